//! What the router holds now. Read when the page is asked for; nothing counts along.

use super::{Family, page::Page};
use crate::router::Router;

const IN_FLIGHT: Family =
    Family::gauge("mla_router_requests_in_flight", "Requests now in the router.", &[]);
const WAITING: Family = Family::gauge(
    "mla_router_requests_waiting",
    "Requests now waiting for a worker that can take them.",
    &[],
);
const TREE_BLOCKS: Family =
    Family::gauge("mla_router_tree_blocks", "Blocks in the prefix tree, each counted once.", &[]);
const TREE_BYTES: Family =
    Family::gauge("mla_router_tree_bytes", "Memory of the prefix tree.", &[]);
const BUILD_INFO: Family =
    Family::gauge("mla_router_build_info", "The version that is running.", &["version"]);

pub(super) fn write(page: &mut Page, router: &Router) {
    page.value(&IN_FLIGHT, router.gate.in_flight() as u64);
    page.value(&WAITING, router.queue.waiting() as u64);
    let tree = router.tree.stats();
    page.value(&TREE_BLOCKS, tree.blocks);
    page.value(&TREE_BYTES, tree.bytes);
    page.family(&BUILD_INFO);
    page.sample(&[env!("CARGO_PKG_VERSION")], 1);
}
