//! A kube-apiserver with etcd. The tests play scheduler and kubelet.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, Config,
    api::{DeleteParams, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::json;
use tokio::process::{Child, Command};

use crate::support::soon;

/// Built by `make test-kubernetes`.
const APISERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/kubernetes/kube-apiserver");

pub(super) struct Cluster {
    folder: PathBuf,
    etcd_port: u16,
    port: u16,
    pub(super) pods: Api<Pod>,
    apiserver: Option<Child>,
    _etcd: Child,
}

impl Cluster {
    pub(super) async fn start(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("mla-kube-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a place for temporary files");
        let (etcd_port, peer_port, port) = (free_port(), free_port(), free_port());
        openssl(&folder, &["genrsa", "-out", "sa.key", "2048"]);
        openssl(&folder, &["rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub"]);
        fs::write(folder.join("tokens.csv"), "secret,admin,1,\"system:masters\"\n").expect("ours");
        let client = format!("http://127.0.0.1:{etcd_port}");
        let peer = format!("http://127.0.0.1:{peer_port}");
        let etcd = spawn(
            Command::new("etcd")
                .args(["--data-dir", "etcd", "--listen-client-urls", &client])
                .args(["--advertise-client-urls", &client, "--listen-peer-urls", &peer])
                .args(["--initial-advertise-peer-urls", &peer])
                .args(["--initial-cluster", &format!("default={peer}")]),
            &folder,
            "etcd.log",
        );
        let kubeconfig = kubeconfig(port);
        fs::write(folder.join("kubeconfig"), &kubeconfig).expect("ours");
        let pods = Api::default_namespaced(client_of(&kubeconfig).await);
        let mut cluster = Self { folder, etcd_port, port, pods, apiserver: None, _etcd: etcd };
        cluster.start_apiserver().await;
        cluster
    }

    /// Returns when it answers.
    pub(super) async fn start_apiserver(&mut self) {
        assert!(Path::new(APISERVER).exists(), "{APISERVER} is not there: make test-kubernetes");
        let mut command = Command::new(APISERVER);
        command
            .arg(format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port))
            .arg(format!("--secure-port={}", self.port))
            .args(["--bind-address=127.0.0.1", "--cert-dir=certs", "--token-auth-file=tokens.csv"])
            .args(["--service-cluster-ip-range=10.0.0.0/24", "--authorization-mode=RBAC"])
            .args(["--service-account-issuer=https://x", "--service-account-key-file=sa.pub"])
            .args(["--service-account-signing-key-file=sa.key", "--api-audiences=api"])
            .args(["--disable-admission-plugins=ServiceAccount"]);
        self.apiserver = Some(spawn(&mut command, &self.folder, "apiserver.log"));
        // The namespace `default` is created shortly after the server answers.
        soon(async {
            while self.create("trial").await.is_err() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
        self.delete("trial").await;
    }

    /// Kills the server (SIGKILL).
    pub(super) async fn kill_apiserver(&mut self) {
        let mut apiserver = self.apiserver.take().expect("running");
        apiserver.kill().await.expect("running");
    }

    pub(super) fn kubeconfig(&self) -> PathBuf {
        self.folder.join("kubeconfig")
    }

    /// Creates a pod that is scheduled on a node.
    pub(super) async fn create(&self, name: &str) -> kube::Result<Pod> {
        let pod = json!({
            "metadata": { "name": name, "labels": { "app": "worker" } },
            "spec": {
                "nodeName": "node",
                "containers": [{ "name": "worker", "image": "worker" }],
            },
        });
        let pod = serde_json::from_value(pod).expect("a pod");
        self.pods.create(&PostParams::default(), &pod).await
    }

    /// Sets the status that the node reports.
    pub(super) async fn report(&self, name: &str, ip: &str, ready: bool) {
        let ready = if ready { "True" } else { "False" };
        let status = json!({ "status": {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{ "ip": ip }],
            "conditions": [{ "type": "Ready", "status": ready }],
        }});
        let patched =
            self.pods.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await;
        patched.expect("a pod of ours");
    }

    pub(super) async fn run(&self, name: &str, ip: &str) {
        self.create(name).await.expect("a new name");
        self.report(name, ip, true).await;
    }

    /// Starts the deletion of a pod. The pod stays until its node reports that it has ended.
    pub(super) async fn retire(&self, name: &str) {
        let deleted = self.pods.delete(name, &DeleteParams::default()).await.expect("there");
        let leaving = deleted.left().expect("it is not gone at once");
        assert!(leaving.metadata.deletion_timestamp.is_some(), "{leaving:?}");
    }

    /// Deletes a pod at once.
    pub(super) async fn delete(&self, name: &str) {
        self.pods.delete(name, &DeleteParams::default().grace_period(0)).await.expect("there");
    }

    /// Deletes a pod in etcd directly and compacts the history: an older watch gets `410 Gone`.
    pub(super) async fn delete_unseen(&self, name: &str) {
        let key = format!("/registry/pods/default/{name}");
        let deleted = self.etcd(&["del", &key]).await;
        assert_eq!(deleted.trim(), "1");
        let status = self.etcd(&["endpoint", "status", "-w", "json"]).await;
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        let revision = status[0]["Status"]["header"]["revision"].to_string();
        self.etcd(&["compact", &revision]).await;
    }

    async fn etcd(&self, arguments: &[&str]) -> String {
        let endpoint = format!("http://127.0.0.1:{}", self.etcd_port);
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["--endpoints", &endpoint]).args(arguments);
        let output = command.output().await.expect("etcdctl is installed");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.folder);
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.local_addr().expect("bound").port()
}

/// A process. It is killed when the value is dropped.
fn spawn(command: &mut Command, folder: &Path, log: &str) -> Child {
    let log = fs::File::create(folder.join(log)).expect("ours");
    let command = command.current_dir(folder).stdout(Stdio::null()).stderr(log).kill_on_drop(true);
    command.spawn().expect("installed by make test-kubernetes")
}

fn openssl(folder: &Path, arguments: &[&str]) {
    let mut command = std::process::Command::new("openssl");
    let output = command.args(arguments).current_dir(folder).output().expect("installed");
    assert!(output.status.success(), "{output:?}");
}

/// Accepts any certificate: the server has a self-signed one.
fn kubeconfig(port: u16) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "test", "cluster": {
            "server": format!("https://127.0.0.1:{port}"),
            "insecure-skip-tls-verify": true,
        }}],
        "users": [{ "name": "admin", "user": { "token": "secret" } }],
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "admin" } }],
        "current-context": "test",
    })
    .to_string()
}

async fn client_of(kubeconfig: &str) -> Client {
    let parsed = Kubeconfig::from_yaml(kubeconfig).expect("JSON is YAML");
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(parsed, &options).await.expect("valid");
    Client::try_from(config).expect("valid")
}
