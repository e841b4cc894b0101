// The samples of the last five minutes and of the last hour. The router sends its history once; the page appends the
// samples that arrive while it is open.

/** The two time ranges: seconds between samples, and their number. */
export const RANGES = {
  fine: { period: 1, length: 300, text: "last 5 minutes" },
  coarse: { period: 10, length: 360, text: "last hour" },
};

/** Seconds for which the last known latency or ratio is shown without new requests. */
const MEMORY = 60;

export class History {
  #figures = [];
  #total = { fine: [], coarse: [] };
  #workers = {};

  /** Adds an event of the router: the whole history in the first event of a connection, then the new samples. */
  take({ tick, coarse_every: every, figures, total, workers }, isFirst) {
    this.#figures = figures;
    if (isFirst) {
      this.#total = total;
      this.#workers = workers;
      for (const samples of [total, ...Object.values(workers)]) samples.coarse ??= [];
      return;
    }
    extend(this.#total, total, tick, every);
    const before = this.#workers;
    this.#workers = {};
    for (const [id, news] of Object.entries(workers)) {
      this.#workers[id] = before[id] ?? { fine: [], coarse: [] };
      extend(this.#workers[id], news, tick, every);
    }
  }

  /** Returns the values of a figure of a worker, or of all workers. The latest is last; unknown values are `null`. */
  series(range, figure, worker = null) {
    const samples = (worker === null ? this.#total : this.#workers[worker])?.[range] ?? [];
    const at = this.#figures.indexOf(figure);
    return samples.map((sample) => sample[at]);
  }

  /** Returns the latest value. */
  now(figure, worker = null) {
    return this.series("fine", figure, worker).at(-1) ?? null;
  }

  /** Returns the latest known value of the last minute. */
  lately(figure, worker = null) {
    return this.series("fine", figure, worker).slice(-MEMORY).findLast((n) => n !== null) ?? null;
  }
}

function extend(samples, news, tick, every) {
  news.fine.forEach((sample, i) => {
    samples.fine.push(sample);
    if ((tick - news.fine.length + 1 + i) % every === 0) samples.coarse.push(sample);
  });
  for (const range of ["fine", "coarse"]) {
    samples[range].splice(0, samples[range].length - RANGES[range].length);
  }
}
