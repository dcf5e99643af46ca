//! CNI ADD, ours and that of the reference `ptp` plugin, in turns: the machine is the same for both
//! at every moment.
//!
//! Both ask host-local for an address and make interfaces in a fresh namespace; ours also talks
//! with an agent that syncs a journal before each answer (`cni_add`), which is the disk's time, so
//! that it is measured without as well. Medians. `REFERENCE` is the directory of the reference
//! plugins, `PLUGIN` our program (default: as cargo built it), `ROWS` a file for the rows. Needs
//! root.

// What goes wrong ends the benchmark.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../tests/lab/mod.rs"]
mod lab;

use std::time::{Duration, Instant};

use lab::{FakeAgent, Lab, Pod, answer, variables, vhost_user};
use serde_json::{Value, json};

const ROUNDS: usize = 60;

fn main() {
    // `cargo test --benches` wants to know that it runs, not how fast.
    let rounds = if std::env::args().any(|argument| argument == "--bench") { ROUNDS } else { 2 };
    let reference = std::env::var("REFERENCE")
        .expect("REFERENCE names the directory of the reference CNI plugins");
    let ours =
        std::env::var("PLUGIN").unwrap_or_else(|_| env!("CARGO_BIN_EXE_vhost-rdma-cni").to_owned());
    let lab = Lab::new();
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
    let journal = || Some(std::fs::File::create(lab.dir.path().join("journal")).unwrap());
    let ptp = format!("{reference}/ptp");
    let data = lab.dir.path().join("addresses");
    let ipam = |subnet: &str| json!({"type": "host-local", "subnet": subnet, "dataDir": data});
    let theirs =
        json!({"cniVersion": "1.0.0", "name": "ptp", "type": "ptp", "ipam": ipam("10.1.0.0/16")});
    let mut config = lab.config("1.0.0");
    config["ipam"] = ipam("10.2.0.0/16");
    let mut chained = lab.config("1.0.0");
    chained["prevResult"] = json!({"cniVersion": "1.0.0", "dns": {}});
    let mut times: [Vec<Duration>; 4] = Default::default();
    for _ in 0..rounds {
        let call = |program: &str, config: &Value, pod_name: &str| {
            let pod = Pod::new();
            let args = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=x;K8S_POD_NAME={pod_name}");
            let run = |command: &str| {
                let mut variables = variables(command, &pod.path, "eth1", &reference);
                variables[4].1 = &args;
                let began = Instant::now();
                answer(lab.start_as(&[program], &variables, config.to_string().as_bytes())).good();
                began.elapsed()
            };
            let took = run("ADD");
            run("DEL");
            took
        };
        times[0].push(call(&ptp, &theirs, "web-0"));
        agent.ledger().journal = journal();
        times[1].push(call(&ours, &config, "web-0"));
        agent.ledger().journal = None;
        times[2].push(call(&ours, &config, "web-0"));
        times[3].push(call(&ours, &chained, "without"));
    }
    let [theirs, synced, with, without] = times.map(median);
    let row = |name: &str, value: f64, target: f64| {
        let ratio = value / theirs;
        println!("{name:<24} {value:>8.2} ms {theirs:>8.2} ms {ratio:>6.3}");
        json!({
            "name": name, "ok": ratio <= target, "value": value, "reference": theirs,
            "ratio": ratio, "unit": "ms", "target": format!("<={target}")
        })
    };
    let rows = [
        row("cni_add", synced, 2.0),
        row("cni_add_journal_unsynced", with, 1.25),
        row("cni_add_pod_without_nic", without, 0.25),
    ];
    if let Ok(path) = std::env::var("ROWS") {
        std::fs::write(path, serde_json::to_vec_pretty(&rows).unwrap()).unwrap();
    }
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}
