//! Metrics of the router's process, under the names of the Prometheus client libraries. In a Python program it is
//! the process of that program.

use std::{fs, io};

use super::page::{Family, Page};

const CPU: Family = Family::counter(
    "process_cpu_seconds_total",
    "User and system time of the router's process.",
    &[],
);
const RESIDENT: Family = Family::gauge(
    "process_resident_memory_bytes",
    "Memory of the router's process that is in RAM.",
    &[],
);
const OPEN_FDS: Family =
    Family::gauge("process_open_fds", "Open files and connections of the router's process.", &[]);
const START: Family = Family::gauge(
    "process_start_time_seconds",
    "When the router's process was started, in seconds since 1970.",
    &[],
);

/// Ticks a second in `/proc`. The value is part of Linux' ABI.
const TICKS: f64 = 100.0;

/// The figures of the process.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    pub cpu_s: f64,
    pub resident_bytes: u64,
    pub open_fds: u64,
    pub started_s: f64,
}

impl Process {
    /// Reads the figures from `/proc`. Fails where there is no `/proc`.
    pub fn read() -> io::Result<Self> {
        let stat = fs::read_to_string("/proc/self/stat")?;
        let status = fs::read_to_string("/proc/self/status")?;
        let system = fs::read_to_string("/proc/stat")?;
        let field = |text: &str, name: &str| -> Option<u64> {
            let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
            rest.split_whitespace().next()?.parse().ok()
        };
        // Only the program name, field 2, can contain parentheses and spaces.
        let (_, rest) = stat.rsplit_once(')').unwrap_or(("", &stat));
        let ticks: Vec<f64> =
            rest.split_whitespace().map(|field| field.parse().unwrap_or(0.0)).collect();
        // Fields 14, 15 and 22 of proc(5).
        let [user, kernel, started] =
            [11, 12, 19].map(|index| ticks.get(index).map_or(0.0, |ticks| ticks / TICKS));
        Ok(Self {
            cpu_s: user + kernel,
            resident_bytes: field(&status, "VmRSS:").unwrap_or(0) * 1024,
            // The open directory itself is in the list.
            open_fds: (fs::read_dir("/proc/self/fd")?.count() as u64).saturating_sub(1),
            started_s: field(&system, "btime ").unwrap_or(0) as f64 + started,
        })
    }

    pub fn write(&self, page: &mut Page) {
        page.value(&CPU, self.cpu_s);
        page.value(&RESIDENT, self.resident_bytes);
        page.value(&OPEN_FDS, self.open_fds);
        page.value(&START, self.started_s);
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::Process;

    #[test]
    fn the_process_is_this_one() {
        let file = std::fs::File::open("/proc/self/stat").expect("Linux");
        let process = Process::read().expect("Linux");
        let now = UNIX_EPOCH.elapsed().expect("after 1970").as_secs_f64();
        drop(file);
        assert!((1 << 20..1 << 34).contains(&process.resident_bytes), "{process:?}");
        assert!(process.open_fds >= 4, "three standard ones and ours: {process:?}");
        assert!((now - 3600.0..=now + 1.0).contains(&process.started_s), "{process:?} at {now}");
        assert!((0.0..3600.0 * 64.0).contains(&process.cpu_s), "{process:?}");
    }
}
