//! The page of `/metrics`: the counters, and present values, which are read when the page is requested.

use crate::{
    fleet,
    metrics::{Family, Page, Process},
    router::Router,
};

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

/// Renders the page.
pub fn render(router: &Router) -> String {
    page(router).finish().0
}

fn page(router: &Router) -> Page {
    let mut page = Page::default();
    router.metrics.write(&mut page);
    state(&mut page, router);
    fleet::metrics::write(&mut page, &router.registry.replicas(), &router.tree);
    // Without `/proc` these metrics are missing.
    if let Ok(process) = Process::read() {
        process.write(&mut page);
    }
    page
}

fn state(page: &mut Page, router: &Router) {
    page.value(&IN_FLIGHT, router.gate.in_flight() as u64);
    page.value(&WAITING, router.queue.waiting() as u64);
    let tree = router.tree.stats();
    page.value(&TREE_BLOCKS, tree.blocks);
    page.value(&TREE_BYTES, tree.bytes);
    page.family(&BUILD_INFO);
    page.sample(&[env!("CARGO_PKG_VERSION")], 1);
}

#[cfg(test)]
mod tests {
    use std::{fmt::Write as _, fs};

    use super::page;
    use crate::{config::Config, router::Router};

    const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");

    /// `UPDATE_DOCS=1 cargo test -p mla-router documented` writes the table anew.
    #[tokio::test]
    async fn every_metric_is_documented() {
        let router = Router::new(Config::default()).expect("a good config");
        let (_, families) = page(&router).finish();
        let mut table = String::from("| metric | kind | labels | meaning |\n|---|---|---|---|\n");
        for family in families {
            let labels: Vec<_> = family.labels.iter().map(|label| format!("`{label}`")).collect();
            let (kind, labels) = (family.kind.as_str(), labels.join(", "));
            writeln!(table, "| `{}` | {kind} | {labels} | {} |", family.name, family.help)
                .expect("a String takes any text");
        }
        let page = fs::read_to_string(DOCS).expect("docs/metrics.md");
        let (before, rest) = page.split_once("| metric |").expect("a table");
        let after = rest.split_once("\n\n").map_or("", |(_, after)| after);
        let fresh = format!("{before}{table}\n{after}");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            fs::write(DOCS, &fresh).expect("docs/metrics.md");
        }
        assert_eq!(page, fresh, "run this test with UPDATE_DOCS=1");
    }
}
