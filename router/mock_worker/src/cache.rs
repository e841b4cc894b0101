//! The prefix cache of one engine: pages of KV, found by the hash of everything up to their end, and
//! evicted least recently used first, leaves before what they stand on.

use std::collections::{BTreeSet, HashMap};

/// The hash of a page's tokens and of all before them.
pub type PageHash = u64;

struct Page {
    parent: Option<PageHash>,
    children: u32,
    /// Requests that read or write this page now.
    locks: u32,
    used: u64,
}

/// Every page is free, cached, or private to a running request that is still filling it.
pub struct Cache {
    capacity: usize,
    private: usize,
    pages: HashMap<PageHash, Page>,
    /// What may be evicted, oldest first: neither locked nor stood on.
    idle: BTreeSet<(u64, PageHash)>,
    clock: u64,
}

/// The pages that a running request holds.
#[derive(Debug, Default)]
pub struct Lease {
    /// Cached pages it has locked, from the beginning of its prompt on.
    shared: Vec<PageHash>,
    /// Pages reserved for what it has still to compute.
    private: usize,
}

impl Lease {
    /// Pages of the prompt that need not be computed.
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

    /// Pages that hold something of use: cached or being filled.
    pub fn used(&self) -> usize {
        self.capacity - self.free()
    }

    /// How many of these pages, from the first on, are there.
    pub fn matched(&self, path: &[PageHash]) -> usize {
        path.iter().take_while(|hash| self.pages.contains_key(hash)).count()
    }

    /// Locks what is there of `path` and reserves the rest of `total` pages, evicting for it.
    /// `None`: not enough can be evicted now.
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

    /// The request has computed all of `path`: its private pages become shared. A page that another
    /// request has computed meanwhile is kept once.
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

    /// The request has ended: what it has published stays cached, the rest is free.
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

    /// Evicts all that no running request holds.
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
    fn a_prompt_is_found_again_up_to_where_it_differs() {
        let mut cache = Cache::new(8);
        assert_eq!(run(&mut cache, &[1, 2, 3]), 0);
        assert_eq!(run(&mut cache, &[1, 2, 4]), 2);
        assert_eq!(cache.matched(&[5, 2, 3]), 0, "a page counts only after all before it");
        assert_eq!(cache.used(), 4);
    }

    #[test]
    fn the_least_recently_used_goes_first_and_leaves_before_their_roots() {
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
    fn what_a_running_request_holds_is_not_evicted() {
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
