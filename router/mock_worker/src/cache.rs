//! The prefix cache of one engine: KV pages, found by the hash of all tokens up to their end. The least recently
//! used leaves are evicted first.

use std::collections::{BTreeSet, HashMap};

/// Hash of the tokens of a page and of all tokens before them.
pub type PageHash = u64;

struct Page {
    parent: Option<PageHash>,
    children: u32,
    /// Number of running requests that use this page.
    locks: u32,
    used: u64,
}

/// The cache. Every page is free, cached, or private to a running request that fills it.
pub struct Cache {
    capacity: usize,
    private: usize,
    pages: HashMap<PageHash, Page>,
    /// Evictable pages, oldest first: leaves that are not locked.
    idle: BTreeSet<(u64, PageHash)>,
    clock: u64,
}

/// The pages of a running request.
#[derive(Debug, Default)]
pub struct Lease {
    /// Cached pages of its prompt that it has locked.
    shared: Vec<PageHash>,
    /// Pages that are reserved for tokens to compute.
    private: usize,
}

impl Lease {
    /// Number of cached pages of the prompt.
    pub fn shared(&self) -> usize {
        self.shared.len()
    }
}

impl Cache {
    pub fn new(capacity: usize) -> Self {
        Self { capacity, private: 0, pages: HashMap::new(), idle: BTreeSet::new(), clock: 0 }
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    pub fn free(&self) -> usize {
        self.capacity - self.private - self.pages.len()
    }

    /// Number of used pages: cached or being filled.
    pub fn used(&self) -> usize {
        self.capacity - self.free()
    }

    /// Number of leading pages of `path` that are cached.
    pub fn matched(&self, path: &[PageHash]) -> usize {
        path.iter().take_while(|hash| self.pages.contains_key(hash)).count()
    }

    /// Locks the cached pages of `path` and reserves the rest of `total` pages, with evictions. `None` if not
    /// enough pages can be evicted.
    pub fn reserve(&mut self, path: &[PageHash], total: usize) -> Option<Lease> {
        self.clock += 1;
        let matched = self.matched(path);
        let mut lease = Lease { shared: Vec::with_capacity(total), private: 0 };
        for &hash in &path[..matched] {
            self.lock(hash);
            lease.shared.push(hash);
        }
        let needed = total - matched;
        while self.free() < needed {
            if !self.evict_one() {
                self.release(lease);
                return None;
            }
        }
        lease.private = needed;
        self.private += needed;
        Some(lease)
    }

    /// Publishes the computed pages of `path`: private pages become shared. A page that another request has
    /// computed meanwhile is kept once.
    pub fn publish(&mut self, lease: &mut Lease, path: &[PageHash]) {
        for &hash in &path[lease.shared.len()..] {
            assert!(lease.private > 0, "more pages published than reserved");
            lease.private -= 1;
            self.private -= 1;
            let parent = lease.shared.last().copied();
            if !self.pages.contains_key(&hash) {
                if let Some(parent) = parent.and_then(|parent| self.pages.get_mut(&parent)) {
                    parent.children += 1;
                }
                let page = Page { parent, children: 0, locks: 0, used: self.clock };
                self.pages.insert(hash, page);
            }
            self.lock(hash);
            lease.shared.push(hash);
        }
    }

    /// Ends a request: its published pages stay cached, the others are freed.
    pub fn release(&mut self, lease: Lease) {
        self.private -= lease.private;
        for hash in lease.shared {
            let page = self.pages.get_mut(&hash).expect("contract: a locked page is not evicted");
            page.locks -= 1;
            if page.locks == 0 && page.children == 0 {
                self.idle.insert((page.used, hash));
            }
        }
    }

    /// Evicts all pages that no running request uses.
    pub fn flush(&mut self) {
        while self.evict_one() {}
    }

    fn lock(&mut self, hash: PageHash) {
        let page = self.pages.get_mut(&hash).expect("contract: only cached pages are locked");
        if page.locks == 0 && page.children == 0 {
            self.idle.remove(&(page.used, hash));
        }
        page.locks += 1;
        page.used = self.clock;
    }

    fn evict_one(&mut self) -> bool {
        let Some((_, hash)) = self.idle.pop_first() else {
            return false;
        };
        let page = self.pages.remove(&hash).expect("contract: idle pages are cached");
        if let Some(parent) = page.parent {
            let above = self.pages.get_mut(&parent).expect("contract: leaves go first");
            above.children -= 1;
            if above.locks == 0 && above.children == 0 {
                self.idle.insert((above.used, parent));
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a request over `path` to its end.
    fn run(cache: &mut Cache, path: &[PageHash]) -> usize {
        let mut lease = cache.reserve(path, path.len()).expect("room");
        let shared = lease.shared();
        cache.publish(&mut lease, path);
        cache.release(lease);
        shared
    }

    #[test]
    fn prompt_matches_up_to_the_first_difference() {
        let mut cache = Cache::new(8);
        assert_eq!(run(&mut cache, &[1, 2, 3]), 0);
        assert_eq!(run(&mut cache, &[1, 2, 4]), 2);
        assert_eq!(cache.matched(&[5, 2, 3]), 0, "a page counts only after all before it");
        assert_eq!(cache.used(), 4);
    }

    #[test]
    fn eviction_is_lru_and_leaves_first() {
        let mut cache = Cache::new(6);
        run(&mut cache, &[1, 2, 3]);
        run(&mut cache, &[4, 5, 6]);
        run(&mut cache, &[1, 2]); // 1 and 2 are the newest now, 3 is the oldest
        run(&mut cache, &[7, 8]); // takes 3 and then 6
        assert_eq!(cache.matched(&[1, 2, 3]), 2);
        assert_eq!(cache.matched(&[4, 5, 6]), 2);
        assert_eq!(cache.free(), 0);
    }

    #[test]
    fn pages_of_running_requests_are_not_evicted() {
        let mut cache = Cache::new(4);
        run(&mut cache, &[1, 2]);
        let held = cache.reserve(&[1, 2], 3).expect("room");
        assert_eq!(held.shared(), 2);
        assert!(cache.reserve(&[8, 9], 2).is_none(), "one page is free, none can be evicted");
        assert_eq!(cache.free(), 1, "a reservation that failed holds nothing");
        cache.release(held);
        assert!(cache.reserve(&[8, 9], 2).is_some());
    }

    #[test]
    fn two_requests_that_compute_the_same_page_keep_it_once() {
        let mut cache = Cache::new(8);
        let mut one = cache.reserve(&[1, 2], 2).expect("room");
        let mut two = cache.reserve(&[1, 2], 2).expect("room");
        assert_eq!(cache.used(), 4);
        cache.publish(&mut one, &[1, 2]);
        cache.publish(&mut two, &[1, 2]);
        assert_eq!(cache.used(), 2);
        cache.release(one);
        cache.release(two);
        cache.flush();
        assert_eq!(cache.free(), 8);
    }

    #[test]
    fn pages_add_up_after_any_order_of_events() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut cache = Cache::new(40);
        let mut running: Vec<(Vec<PageHash>, Lease)> = Vec::new();
        for _ in 0..20_000 {
            if running.len() < 4 && random.bool() {
                let group = random.u64(1..6);
                let length = random.usize(1..10);
                let tail = random.u64(0..3);
                let path: Vec<_> = (0..length as u64)
                    .map(|page| group * 1000 + page + if page > 4 { tail * 100 } else { 0 })
                    .collect();
                if let Some(lease) = cache.reserve(&path, path.len() + random.usize(0..3)) {
                    running.push((path, lease));
                }
            } else if !running.is_empty() {
                let (path, mut lease) = running.swap_remove(random.usize(..running.len()));
                if random.bool() {
                    cache.publish(&mut lease, &path);
                }
                cache.release(lease);
            }
            let private: usize = running.iter().map(|(_, lease)| lease.private).sum();
            assert_eq!(cache.free() + cache.pages.len() + private, cache.capacity());
        }
        running.drain(..).for_each(|(_, lease)| cache.release(lease));
        cache.flush();
        assert_eq!(cache.free(), cache.capacity());
    }
}
