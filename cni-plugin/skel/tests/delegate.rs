//! Delegation to real processes: shell scripts in the place of IPAM plugins, since only those
//! misbehave on demand.

// clippy.toml allows these in tests, but does not see that helpers of an integration test are tests
// too.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use cni_skel::{
    AddResult, Answer, Attachment, Command, Delegate, Environment, Error, Interface, Ipam, Network,
    Plugin, run_with,
};
use serde_json::{Value, json};

/// Delegates everything to the configuration's IPAM plugin, for an interface of its own.
struct Delegates;

impl Plugin for Delegates {
    fn add(&self, network: &Network, attachment: &Attachment) -> Result<Answer, Error> {
        let mut result = AddResult::default();
        if let Some(ipam) = Ipam::of(network)? {
            let interface = Interface { name: attachment.ifname.clone(), ..Interface::default() };
            result.attach(interface, ipam.ifname("net7").add()?);
        }
        Ok(result.into())
    }
    fn del(&self, network: &Network, _: &Attachment) -> Result<(), Error> {
        Ipam::of(network)?.map_or(Ok(()), |ipam| ipam.del())
    }
    fn check(&self, network: &Network, _: &Attachment) -> Result<(), Error> {
        let slow = Delegate::new(network, network.config.ipam_kind()?.unwrap_or_default());
        slow.timeout(Duration::from_millis(300)).run(Command::Check).map(drop)
    }
}

struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    /// A directory with the plugin `ipam`, which notes its calls in `calls`.
    fn new(body: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("ipam");
        let notes = format!(
            "#!/bin/sh\necho \"$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME $CNI_NETNS $CNI_ARGS\" >> \
             {0}/calls\ncat > {0}/stdin\n{body}\n",
            dir.path().display()
        );
        fs::write(&script, notes).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        Self { dir }
    }

    fn call(&self, command: &str, config: &Value) -> (u8, Value) {
        self.call_in(command, config, self.dir.path())
    }

    fn call_in(&self, command: &str, config: &Value, path: &Path) -> (u8, Value) {
        let environment = Environment::from([
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", "/run/netns/none"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_ARGS", "K8S_POD_NAME=p"),
            ("CNI_PATH", path.to_str().unwrap()),
        ]);
        let mut out = Vec::new();
        let status =
            run_with(&Delegates, &environment, &mut config.to_string().as_bytes(), &mut out);
        (status, serde_json::from_slice(&out).unwrap_or(Value::Null))
    }

    fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.dir.path().join("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }
}

fn config() -> Value {
    json!({
        "cniVersion": "1.0.0", "name": "net", "type": "t", "x": [1], "ipam": {"type": "ipam"},
        "prevResult": {}
    })
}

#[test]
fn add_gets_addresses_for_the_interface_that_was_named() {
    let bench = Bench::new(
        r#"echo noise >&2; echo '{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.2/24","gateway":"10.0.0.1"}],"dns":{}}'"#,
    );
    let (status, document) = bench.call("ADD", &config());
    assert_eq!(status, 0, "{document}");
    assert_eq!(
        document["ips"][0],
        json!({"address": "10.0.0.2/24", "gateway": "10.0.0.1", "interface": 0})
    );
    assert_eq!(bench.calls(), ["ADD c1 net7 /run/netns/none K8S_POD_NAME=p"]);
    let input = fs::read(bench.dir.path().join("stdin")).unwrap();
    assert_eq!(
        serde_json::from_slice::<Value>(&input).unwrap(),
        config(),
        "the delegate sees all of it"
    );
}

#[test]
fn a_failed_add_is_taken_back_and_keeps_its_code() {
    let bench = Bench::new(
        r#"[ $CNI_COMMAND = DEL ] && exit 0; echo '{"cniVersion":"1.0.0","code":11,"msg":"full","details":"d"}'; exit 1"#,
    );
    let (status, document) = bench.call("ADD", &config());
    assert_eq!(status, 1);
    assert_eq!(
        document,
        json!({"cniVersion": "1.0.0", "code": 11, "msg": "ipam ADD: full", "details": "d"})
    );
    assert_eq!(bench.calls().len(), 2);
    assert!(bench.calls()[1].starts_with("DEL c1 net7 "), "{:?}", bench.calls());
}

#[test]
fn an_answer_that_cannot_be_read_is_taken_back() {
    for answer in
        ["nonsense", "[]", r#"{"cniVersion":"0.2.0","ip4":{}}"#, r#"{"ips":[{"address":"x"}]}"#]
    {
        let bench = Bench::new(&format!("[ $CNI_COMMAND = DEL ] || echo '{answer}'"));
        let (status, document) = bench.call("ADD", &config());
        let code = if answer.contains("0.2.0") { 1 } else { 6 };
        assert_eq!((status, &document["code"]), (1, &json!(code)), "{answer}: {document}");
        assert_eq!(bench.calls().len(), 2, "{answer}");
    }
}

#[test]
fn a_delegate_that_fails_without_words() {
    let bench = Bench::new("echo because >&2; exit 3");
    let (_, document) = bench.call("DEL", &config());
    assert_eq!((&document["code"], &document["details"]), (&json!(999), &json!("because")));
    let bench = Bench::new("kill -9 $$");
    let (_, document) = bench.call("ADD", &config());
    assert_eq!(document["code"], 999);
    assert!(
        document["details"].as_str().unwrap().contains("taking the address back"),
        "{document}"
    );
}

#[test]
fn a_delegate_that_does_not_end_is_killed() {
    let bench = Bench::new("exec sleep 600");
    let began = Instant::now();
    let (_, document) = bench.call("CHECK", &config());
    assert_eq!(document["code"], 11, "{document}");
    assert!(began.elapsed() < Duration::from_secs(60));
}

#[test]
fn much_input_and_output_do_not_block_each_other() {
    let bench =
        Bench::new("head -c 3000000 /dev/zero | tr '\\0' ' '; echo '{\"cniVersion\":\"1.0.0\"}'");
    let mut config = config();
    config["long"] = json!("x".repeat(2_000_000));
    let (status, document) = bench.call("ADD", &config);
    assert_eq!(status, 0, "{document}");
}

#[test]
fn plugins_that_are_not_there() {
    let bench = Bench::new("");
    for (kind, code) in [("absent", 4), ("../ipam", 7), ("/bin/sh", 7), ("..", 7), ("stdin", 4)] {
        fs::write(bench.dir.path().join("stdin"), "not executable").unwrap();
        let mut config = config();
        config["ipam"]["type"] = json!(kind);
        let (status, document) = bench.call("DEL", &config);
        assert_eq!((status, &document["code"]), (1, &json!(code)), "{kind}: {document}");
        assert!(code == 7 || document["msg"].as_str().unwrap().contains("CNI_PATH"), "{document}");
    }
    let (_, document) = bench.call_in("DEL", &config(), Path::new(""));
    assert_eq!(document["code"], 4, "{document}");
    let path = format!("/nonexistent:{}", bench.dir.path().display());
    assert_eq!(bench.call_in("DEL", &config(), Path::new(&path)).0, 0);
    let mut config = config();
    config["ipam"] = json!({"subnet": "10.0.0.0/8"});
    assert_eq!(bench.call("ADD", &config).1["code"], 7);
}
