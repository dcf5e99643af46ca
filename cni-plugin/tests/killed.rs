//! An ADD that fails, and a plugin that dies at any moment: what it made is undone, by itself, by
//! DEL or by GC.

// clippy.toml allows these in tests, but does not see that helpers of an integration test are tests
// too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod lab;

use lab::{FakeAgent, Kill, Lab, Pod, answer, chained, files_in, variables, vhost_user};
use serde_json::json;
use vhost_rdma_agent_api::FaultKind;

#[test]
fn a_failed_add_leaves_nothing() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let given = lab.ipam();
    lab.script(
        "full",
        "#!/bin/sh\n[ $CNI_COMMAND = ADD ] || exit 0\n\
         echo '{\"cniVersion\":\"1.0.0\",\"code\":11,\"msg\":\"no address is left\"}'; exit 1\n",
    );
    let nics = vec![vhost_user("blue-0", "rdma0", "t0"), vhost_user("blue-1", "rdma1", "t1")];
    let agent = FakeAgent::start(&lab.socket(), nics);
    let mut config = chained(&lab, "1.0.0", &pod);
    config["ipam"] = json!({"type": "full"});
    let answer = lab.call("ADD", &pod, &config);
    assert_eq!(
        (answer.code(), answer.document["msg"].as_str()),
        (11, Some("NIC blue-0: full ADD: no address is left"))
    );
    let clean = || {
        assert_eq!((pod.left(), lab.left_on_host(), files_in(&given)), (vec![], vec![], vec![]));
        assert!(agent.ledger().records.is_empty(), "{:?}", agent.ledger().records);
    };
    clean();
    config["ipam"] = json!({"type": "ipam"});
    // The agent refuses in the middle: attach, intend, intend, attached.
    for (number, kind, code) in [
        (0, FaultKind::TryAgain, 11),
        (1, FaultKind::Internal, 999),
        (2, FaultKind::Conflict, 100),
        (3, FaultKind::NotFound, 3),
        (0, FaultKind::NotReady, 50),
        (0, FaultKind::BadRequest, 7),
    ] {
        agent.refuse(Some((number, kind)));
        assert_eq!(lab.call("ADD", &pod, &config).code(), code);
        agent.refuse(None);
        clean();
    }
    lab.call("ADD", &pod, &config).good();
    lab.call("DEL", &pod, &config).good();
    clean();
}

#[test]
fn killed_at_each_word_with_the_agent_then_del_or_gc() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let given = lab.ipam();
    let nics = vec![vhost_user("blue-0", "rdma0", "t0"), vhost_user("blue-1", "rdma1", "t1")];
    let agent = FakeAgent::start(&lab.socket(), nics);
    let mut config = chained(&lab, "1.1.0", &pod);
    config["ipam"] = json!({"type": "ipam"});
    let mut collect = config.clone();
    collect["cni.dev/valid-attachments"] = json!([]);
    let clean = |when: Kill, how: &str| {
        assert_eq!(
            (pod.left(), lab.left_on_host(), files_in(&given)),
            (vec![], vec![], vec![]),
            "{when:?} {how}"
        );
        assert!(agent.ledger().records.is_empty(), "{when:?} {how}");
    };
    // attach, intend, intend, attached.
    for number in 0..4 {
        for when in [Kill::Before(number), Kill::After(number)] {
            for how in ["DEL", "GC", "DEL without a namespace"] {
                agent.kill(Some(when));
                assert!(lab.call("ADD", &pod, &config).killed(), "{when:?}");
                agent.kill(None);
                let answer = match how {
                    "DEL" => lab.call("DEL", &pod, &config),
                    "GC" => lab.call("GC", &pod, &collect),
                    _ => lab.run(
                        &variables("DEL", "", "eth1", lab.dir.path().to_str().unwrap()),
                        &config,
                    ),
                };
                assert_eq!(answer.code(), 0, "{when:?} {how}: {answer:?}");
                let _ = std::fs::remove_file(given.join("gc"));
                clean(when, how);
            }
        }
    }
    // And DEL itself: detach, then detach and detached for each NIC.
    for number in 0..5 {
        for when in [Kill::Before(number), Kill::After(number)] {
            lab.call("ADD", &pod, &config).good();
            agent.kill(Some(when));
            assert!(lab.call("DEL", &pod, &config).killed(), "{when:?}");
            agent.kill(None);
            lab.call("DEL", &pod, &config).good();
            clean(when, "DEL again");
        }
    }
}

/// At any moment, not only when it talks: dead after each of its system calls in turn that change
/// something.
#[test]
fn killed_after_each_system_call_that_changes_the_host() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "t0")]);
    let config = chained(&lab, "1.0.0", &pod);
    let mut kills = 0;
    for call in ["sendto", "ioctl"] {
        for number in 1.. {
            let inject = format!("inject={call}:signal=KILL:when={number}");
            let trace = format!("trace={call}");
            let program = [
                "strace",
                "-f",
                "-qq",
                "-o",
                "/dev/null",
                "-e",
                &trace,
                "-e",
                &inject,
                env!("CARGO_BIN_EXE_vhost-rdma-cni"),
            ];
            let child = lab.start_as(
                &program,
                &variables("ADD", &pod.path, "eth1", "/"),
                config.to_string().as_bytes(),
            );
            let ended = answer(child);
            if ended.status.success() {
                lab.call("DEL", &pod, &config).good();
                break;
            }
            assert!(ended.document.is_null(), "killed, not refused: {ended:?}");
            kills += 1;
            lab.call("DEL", &pod, &config).good();
            assert_eq!((pod.left(), lab.left_on_host()), (vec![], vec![]), "{call} {number}");
            assert!(agent.ledger().records.is_empty());
        }
    }
    assert!(kills > 20, "only {kills} system calls were found to kill it at");
}

/// A runtime that gave an ADD up while it waited: what that made before the DEL has its turn is
/// undone, too.
#[test]
fn a_del_that_waited_undoes_what_was_made_meanwhile() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "t0")]);
    let config = chained(&lab, "1.0.0", &pod);
    lab.call("ADD", &pod, &config).good();
    agent.ledger().requests.clear();
    let made = std::mem::take(&mut agent.ledger().records[0].steps);
    let held = lab.hold("blue-0");
    let late = lab.start(&variables("DEL", &pod.path, "eth1", "/"), config.to_string().as_bytes());
    lab::until_detach(&agent);
    agent.ledger().records[0].steps = made;
    drop(held);
    answer(late).good();
    assert_eq!((pod.left(), lab.left_on_host()), (vec![], vec![]));
    assert!(agent.ledger().records.is_empty());
}
