//! `--service-discovery`: the workers are the pods of a Kubernetes cluster that have the labels of
//! `--selector`, while they are ready.

use std::{collections::BTreeMap, net::IpAddr, pin::pin, time::Duration};

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    runtime::watcher::{self, Event, watcher},
};
use tokio::time::sleep;

use super::{Following, Found, Told};
use crate::{config::Config, error::StartError, names::WorkerUrl};

/// Pause after the API server could not be asked.
const PAUSE: Duration = Duration::from_secs(1);

/// The API server ends a watch after this, and it is begun anew where it ended.
const WATCH_SECONDS: u32 = 30;

/// Nothing comes for so long only if the connection is gone and nobody has said so.
const READ_TIMEOUT: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 10);

/// The pods to watch.
pub(super) struct Pods {
    api: Api<Pod>,
    labels: String,
    port: u16,
}

impl Pods {
    /// Finds the cluster: the one that the router runs in, or that of the kubeconfig.
    pub(super) async fn prepare(config: &Config) -> Result<Self, StartError> {
        let refuse = |why: String| StartError::Discovery(format!("--service-discovery: {why}"));
        if config.selector.is_empty() {
            // All pods of a namespace are never meant: the router is one of them.
            return Err(refuse("needs --selector, the labels of the pods that are workers".into()));
        }
        let mut cluster = kube::Config::infer().await.map_err(|error| refuse(error.to_string()))?;
        cluster.read_timeout = Some(READ_TIMEOUT);
        let namespace = config.service_discovery_namespace.clone();
        let namespace = namespace.unwrap_or_else(|| cluster.default_namespace.clone());
        let client = Client::try_from(cluster).map_err(|error| refuse(error.to_string()))?;
        Ok(Self {
            api: Api::namespaced(client, &namespace),
            labels: config.selector.join(","),
            port: config.service_discovery_port,
        })
    }

    /// What is known stays known while the API server is away: workers do not need it to serve.
    pub(super) async fn follow(self, mut following: Following) {
        let wanted = watcher::Config::default().labels(&self.labels).timeout(WATCH_SECONDS);
        let mut events = pin!(watcher(self.api, wanted));
        let mut known = Known::default();
        let mut away = false;
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    if std::mem::take(&mut away) {
                        tracing::info!("Kubernetes: the API server is back");
                    }
                    known.take(event, self.port);
                    following.update(known.found());
                }
                Err(error) => {
                    if !std::mem::replace(&mut away, true) {
                        tracing::warn!("Kubernetes: {error}; the workers stay as they are");
                    }
                    sleep(PAUSE).await;
                }
            }
        }
    }
}

/// The pods that run and stay, by their uid.
#[derive(Default)]
struct Known {
    pods: BTreeMap<String, Place>,
    /// While the API server lists them anew: what it has named so far.
    listing: BTreeMap<String, Place>,
}

#[derive(Debug, PartialEq)]
struct Place {
    url: WorkerUrl,
    ready: bool,
}

impl Known {
    fn take(&mut self, event: Event<Pod>, port: u16) {
        match event {
            Event::Init => self.listing.clear(),
            Event::InitApply(pod) => {
                if let (Some(uid), Some(place)) = (pod.metadata.uid.clone(), place(&pod, port)) {
                    self.listing.insert(uid, place);
                }
            }
            Event::InitDone => self.pods = std::mem::take(&mut self.listing),
            Event::Apply(pod) => {
                if let Some(uid) = pod.metadata.uid.clone() {
                    match place(&pod, port) {
                        Some(place) => self.pods.insert(uid, place),
                        None => self.pods.remove(&uid),
                    };
                }
            }
            Event::Delete(pod) => {
                if let Some(uid) = pod.metadata.uid {
                    self.pods.remove(&uid);
                }
            }
        }
    }

    fn found(&self) -> Found {
        let mut found = Found::new();
        // The ready ones last: a pod that has ended may have left its address to one of them.
        for ready in [false, true] {
            for (uid, place) in self.pods.iter().filter(|(_, place)| place.ready == ready) {
                found.insert(place.url.clone(), Told { who: uid.clone(), ready });
            }
        }
        found
    }
}

/// Where a pod serves, if it runs and stays.
fn place(pod: &Pod, port: u16) -> Option<Place> {
    let status = pod.status.as_ref()?;
    let has_ended = matches!(status.phase.as_deref(), Some("Failed" | "Succeeded"));
    // Ready is taken back late: a pod that is being deleted gets no more requests.
    if has_ended || pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let mut conditions = status.conditions.iter().flatten();
    let ready = conditions.any(|is| is.type_ == "Ready" && is.status == "True");
    let url = match status.pod_ip.as_ref()?.parse().ok()? {
        IpAddr::V4(ip) => format!("http://{ip}:{port}"),
        IpAddr::V6(ip) => format!("http://[{ip}]:{port}"),
    };
    Some(Place { url: url.parse().ok()?, ready })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(uid: &str, ip: &str, ready: &str) -> Pod {
        let pod = json!({
            "metadata": { "name": uid, "uid": uid },
            "status": {
                "podIP": ip,
                "conditions": [{ "type": "Ready", "status": ready }],
            },
        });
        serde_json::from_value(pod).expect("a pod")
    }

    fn urls(known: &Known) -> Vec<String> {
        let line = |(url, told): (WorkerUrl, Told)| {
            let away = if told.ready { "" } else { " away" };
            format!("{url} {}{away}", told.who)
        };
        known.found().into_iter().map(line).collect()
    }

    #[test]
    fn only_a_pod_that_stays_has_a_place() {
        let url = |pod: &Pod| place(pod, 8000).map(|place| place.url.to_string());
        assert_eq!(url(&pod("a", "10.0.0.1", "True")).as_deref(), Some("http://10.0.0.1:8000"));
        assert_eq!(url(&pod("a", "fd00::1", "True")).as_deref(), Some("http://[fd00::1]:8000"));
        assert_eq!(place(&pod("a", "10.0.0.1", "False"), 80).map(|place| place.ready), Some(false));
        let mut ended = pod("a", "10.0.0.1", "False");
        ended.status.as_mut().expect("a status").phase = Some("Failed".to_owned());
        assert_eq!(url(&ended), None);
        assert_eq!(url(&pod("a", "", "True")), None);
        assert_eq!(url(&Pod::default()), None);
        let mut leaving = serde_json::to_value(pod("a", "10.0.0.1", "True")).expect("JSON");
        leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        assert_eq!(url(&serde_json::from_value(leaving).expect("a pod")), None);
    }

    #[test]
    fn a_list_counts_when_it_is_whole() {
        let mut known = Known::default();
        let a = pod("a", "10.0.0.1", "True");
        known.take(Event::Apply(a), 1);
        known.take(Event::Init, 1);
        known.take(Event::InitApply(pod("b", "10.0.0.2", "True")), 1);
        assert_eq!(urls(&known), ["http://10.0.0.1:1 a"], "nobody is dropped for a list half read");
        known.take(Event::InitDone, 1);
        assert_eq!(urls(&known), ["http://10.0.0.2:1 b"]);
        known.take(Event::Delete(pod("b", "10.0.0.2", "True")), 1);
        assert!(urls(&known).is_empty());
    }

    #[test]
    fn the_next_pod_at_an_address_is_another_worker() {
        let mut known = Known::default();
        known.take(Event::Apply(pod("a", "10.0.0.1", "True")), 1);
        known.take(Event::Apply(pod("a", "10.0.0.1", "False")), 1);
        assert_eq!(urls(&known), ["http://10.0.0.1:1 a away"]);
        known.take(Event::Apply(pod("b", "10.0.0.1", "True")), 1);
        known.take(Event::Delete(pod("a", "10.0.0.1", "False")), 1);
        assert_eq!(urls(&known), ["http://10.0.0.1:1 b"]);
    }
}
