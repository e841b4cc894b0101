//! The router returns unused memory to the system.

use std::{fs, time::Duration};

use http::StatusCode;
use tokio::{task::JoinSet, time::sleep};

use crate::support::{Client, FakeWorker, Process, post, soon};

const MIB: usize = 1 << 20;

/// Returns the resident memory of the process.
fn resident(process: &Process) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).expect("running");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("Linux");
    let kib: usize = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib << 10
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_large_bodies_is_returned_when_idle() {
    let worker = FakeWorker::plain().await;
    let mut process = Process::start(&["--port", "0", "--worker-urls", &worker.url()]);
    let address = process.address().await;
    process.line_with("is up").await;
    let before = resident(&process);
    let mut requests = JoinSet::new();
    for _ in 0..6 {
        requests.spawn(async move {
            let request = post("/v1/completions", vec![b'x'; 40 * MIB]);
            let mut client = Client::connect(address).await;
            client.call(request).await.expect("a whole response").status
        });
    }
    for status in soon(requests.join_all()).await {
        assert_eq!(status, StatusCode::OK);
    }
    let returned = async {
        while resident(&process) > before + 40 * MIB {
            sleep(Duration::from_millis(100)).await;
        }
    };
    soon(returned).await;
}
