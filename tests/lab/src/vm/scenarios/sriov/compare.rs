//! What our crate reads beside what iproute2 reads, field by field.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Host;

/// (our name, theirs).
type Names = &'static [(&'static str, &'static str)];

const DEVICE: Names = &[
    ("index", "ifindex"),
    ("name", "ifname"),
    ("node_type", "node_type"),
    ("node_guid", "node_guid"),
    ("system_image_guid", "sys_image_guid"),
    ("protocol", "protocol"),
    ("adaptive_moderation", "adaptive-moderation"),
    ("firmware", "fw"),
];
const PORT: Names = &[
    ("device_index", "ifindex"),
    ("device", "ifname"),
    ("port", "port"),
    ("state", "state"),
    ("physical_state", "physical_state"),
    ("netdev", "netdev"),
    ("netdev_index", "netdev_index"),
    ("lid", "lid"),
    ("sm_lid", "sm_lid"),
    ("lmc", "lmc"),
];
const QP: Names = &[
    ("number", "lqpn"),
    ("port", "port"),
    ("kind", "type"),
    ("state", "state"),
    ("remote_number", "rqpn"),
    ("receive_psn", "rq-psn"),
    ("send_psn", "sq-psn"),
    ("path_migration", "path-mig-state"),
    ("pd", "pdn"),
    ("pid", "pid"),
];
const CM_ID: Names = &[
    ("number", "cm-idn"),
    ("port", "port"),
    ("qp", "lqpn"),
    ("kind", "type"),
    ("state", "state"),
    ("port_space", "ps"),
    ("source", "src-addr"),
    ("destination", "dst-addr"),
    ("pid", "pid"),
];
const CQ: Names = &[
    ("number", "cqn"),
    ("entries", "cqe"),
    ("users", "users"),
    ("adaptive_moderation", "adaptive-moderation"),
    ("context", "ctxn"),
    ("pid", "pid"),
];
const MR: Names = &[
    ("number", "mrn"),
    ("length", "mrlen"),
    ("lkey", "lkey"),
    ("rkey", "rkey"),
    ("pd", "pdn"),
    ("pid", "pid"),
];
const PD: Names = &[
    ("number", "pdn"),
    ("users", "users"),
    ("local_dma_lkey", "local_dma_lkey"),
    ("context", "ctxn"),
    ("pid", "pid"),
];
const CTX: Names = &[("number", "ctxn"), ("pid", "pid")];

/// rxe on the guest's ordinary interface, with a program that holds objects of every kind on it.
const LOAD: &str = "set -e
    rdma link add rxe0 type rxe netdev eth0
    timeout 100 ibv_rc_pingpong -d rxe0 -g 1 >/dev/null 2>&1 &
    timeout 100 ibv_srq_pingpong -p 18516 -d rxe0 -g 1 >/dev/null 2>&1 &
    timeout 100 rping -s -a 10.9.0.1 >/dev/null 2>&1 &
    sleep 4";

pub(super) fn rdma(host: &mut Host) -> Result<()> {
    host.sh(LOAD)?;
    let ours = host.ask("rdma-json")?;
    let one = |path: &str| {
        ours.pointer(path).cloned().with_context(|| format!("rdma-json shows no {path}: {ours}"))
    };
    same_lists(
        "device",
        &Value::Array(vec![one("/devices/0/device")?]),
        &host.ask("rdma -j dev show")?,
        DEVICE,
    )?;
    same_lists("port", &one("/devices/0/ports")?, &host.ask("rdma -j link show")?, PORT)?;
    for (kind, names) in
        [("qp", QP), ("cm_id", CM_ID), ("cq", CQ), ("mr", MR), ("pd", PD), ("ctx", CTX)]
    {
        let theirs = host.ask(&format!("rdma -j -d res show {kind}"))?;
        ensure!(
            theirs.as_array().is_some_and(|list| !list.is_empty()),
            "there is no {kind} to compare"
        );
        same_lists(kind, &one(&format!("/devices/0/{kind}"))?, &theirs, names)?;
    }
    srqs(host, &one("/devices/0/srq")?)?;
    counts(host, &one("/devices/0/counts")?)?;
    counters(host, &one("/devices/0/counters/0")?)?;
    let netns = host.sh("rdma system show")?;
    let mode = one("/system/netns_mode")?;
    ensure!(
        mode.as_str().is_some_and(|mode| netns.contains(&format!("netns {mode}"))),
        "namespace mode {mode}, but {netns}"
    );
    interfaces(host, &one("/interfaces")?)?;
    host.sh("pkill -x ibv_rc_pingpong; pkill -x ibv_srq_pingpon; pkill -x rping; sleep 0.5; \
         rdma link delete rxe0")?;
    Ok(())
}

/// `set -e` takes no notice of `! command`.
const REFUSED: &str = "set -e
    refused() { if \"$@\" 2>/tmp/refused; then echo \"not refused: $*\"; exit 1; fi; }";

/// What the crate changes, as `rdma` sees it; and what it is told while that happens.
pub(super) fn changes(host: &mut Host) -> Result<()> {
    host.sh(&format!(
        "{REFUSED}
        rdma-json monitor 99 > /tmp/events & m=$!; for n in $(seq 50); do [ -s /tmp/events ] && \
            break; sleep 0.2; done
        rdma-json add one rxe eth0
        refused rdma-json add one rxe eth0; grep -q 'File exists' /tmp/refused
        rdma-json rename one two; rdma link show two/1 | grep -q 'netdev eth0'
        refused rdma-json rename one three
        test -c /dev/infiniband/$(rdma-json | sed -n 's/.*\"name\": \"\\(uverbs[0-9]*\\)\".*/\\1/p')
        rdma-json delete two; refused rdma link show two/1; refused rdma-json delete two
        sleep 1; kill $m"
    ))?;
    let events = host.sh("cat /tmp/events")?;
    let newer = host.sh("[ $(uname -r | cut -d. -f1) -ge 7 ] && echo yes; true")?;
    // Linux 6.12 has no announcement of names.
    let kinds: &[&str] = if newer.trim() == "yes" {
        &["REGISTER", "RENAME", "UNREGISTER"]
    } else {
        &["REGISTER", "UNREGISTER"]
    };
    for kind in kinds {
        ensure!(
            events.contains(&format!("\"kind\":\"{kind}\"")),
            "no {kind} among the announcements:\n{events}"
        );
    }
    // Exclusive mode, and a driver that cannot move: refused, in the kernel's words, and nothing
    // has changed.
    let said = host.sh(&format!(
        "{REFUSED}
        rdma-json mode exclusive; rdma system show
        rdma-json add one rxe eth0; ip netns add blue
        refused rdma-json move one /run/netns/blue two; cat /tmp/refused; rdma dev show
        refused rdma-json move one /proc/self/ns/uts
        rdma-json delete one; ip netns del blue; sleep 0.5; rdma-json mode shared; \
            rdma system show"
    ))?;
    for words in ["netns exclusive", "cannot move RDMA device", "one: node_type", "netns shared"] {
        ensure!(said.contains(words), "nobody said {words:?}:\n{said}");
    }
    Ok(())
}

fn srqs(host: &mut Host, ours: &Value) -> Result<()> {
    let theirs = host.ask("rdma -j -d res show srq")?;
    same_lists("srq", ours, &theirs, &[("number", "srqn"), ("pd", "pdn"), ("pid", "pid")])
}

fn counts(host: &mut Host, ours: &Value) -> Result<()> {
    let theirs = host.ask("rdma -j res show")?;
    for count in ours.as_array().context("no counts")? {
        let name = count.get("name").and_then(Value::as_str).unwrap_or_default();
        let (we, they) = (count.get("current"), theirs.pointer(&format!("/0/{name}")));
        ensure!(we.is_some() && we == they, "{name}: we read {we:?}, rdma {they:?}");
    }
    Ok(())
}

/// Counters run: they are read before and after, and must lie between.
fn counters(host: &mut Host, before: &Value) -> Result<()> {
    let theirs = host.ask("rdma -j statistic show")?;
    let after =
        host.ask("rdma-json")?.pointer("/devices/0/counters/0").cloned().context("no counters")?;
    let (before, after) = (
        before.as_array().context("no counters")?,
        after.as_array().context("no counters")?.clone(),
    );
    ensure!(!before.is_empty(), "no counters");
    for (low, high) in before.iter().zip(&after) {
        let name = low.get("name").and_then(Value::as_str).unwrap_or_default();
        let number = |value: Option<&Value>| {
            value.and_then(Value::as_u64).with_context(|| format!("counter {name} is no number"))
        };
        let (low, high) = (number(low.get("value"))?, number(high.get("value"))?);
        let they = number(theirs.pointer(&format!("/0/{name}")))?;
        ensure!(
            (low..=high).contains(&they),
            "{name}: we read {low} and then {high}, rdma {they} between"
        );
    }
    Ok(())
}

fn interfaces(host: &mut Host, ours: &Value) -> Result<()> {
    let theirs = host.ask("ip -j link show")?;
    same_lists(
        "interface",
        ours,
        &theirs,
        &[("index", "ifindex"), ("name", "ifname"), ("mtu", "mtu"), ("address", "address")],
    )
}

/// Both lists have the same elements, in any order; the first names identify one.
fn same_lists(what: &str, ours: &Value, theirs: &Value, names: Names) -> Result<()> {
    let (ours, theirs) =
        (ours.as_array().context("no list")?, theirs.as_array().context("no list")?);
    ensure!(
        ours.len() == theirs.len(),
        "{what}: we read {} and iproute2 {}\n{ours:?}\n{theirs:?}",
        ours.len(),
        theirs.len()
    );
    let (id, their_id) = names.first().context("no names")?;
    let mut compared = 0;
    for they in theirs {
        let we = ours
            .iter()
            .find(|we| same(we.get(id), they.get(their_id)))
            .with_context(|| format!("{what}: we do not read {they}"))?;
        for (our_name, their_name) in names {
            // The tool leaves out what is not there, as we do.
            if let Some(their) = they.get(their_name) {
                ensure!(
                    same(we.get(our_name), Some(their)),
                    "{what}: {their_name} is {their}, but we read {:?}\n{we}\n{they}",
                    we.get(our_name)
                );
                compared += 1;
            }
        }
    }
    ensure!(compared >= theirs.len() * 2, "{what}: only {compared} fields could be compared");
    Ok(())
}

/// The tool prints keys in hexadecimal and addresses without what it thinks superfluous.
fn same(ours: Option<&Value>, theirs: Option<&Value>) -> bool {
    match (ours, theirs) {
        (Some(Value::Number(ours)), Some(Value::String(theirs))) => {
            u64::from_str_radix(theirs, 16).ok() == ours.as_u64()
        }
        (Some(ours), Some(theirs)) => ours == theirs,
        _ => false,
    }
}

/// VF `n` in the output of `ip -j -d link show`.
pub(super) fn ip_vf(shown: &Value, n: u64) -> Result<Value> {
    let list = shown
        .pointer("/0/vfinfo_list")
        .and_then(Value::as_array)
        .with_context(|| format!("ip shows no VFs: {shown}"))?;
    list.iter()
        .find(|vf| vf.get("vf") == Some(&Value::from(n)))
        .cloned()
        .with_context(|| format!("ip shows no VF {n}"))
}

/// `vf list` beside sysfs and `ip`.
pub(super) fn inventory(host: &mut Host) -> Result<()> {
    let (pf, address) = (host.pf.clone(), host.address.clone());
    let list = host.list()?;
    let shown = host.ask(&format!("ip -j -d link show dev {pf}"))?;
    let total = host.sh(&format!("cat /sys/bus/pci/devices/{address}/sriov_totalvfs"))?;
    ensure!(
        list.get("total_vfs").map(Value::to_string).as_deref() == Some(total.trim()),
        "total_vfs is not {total}"
    );
    ensure!(
        list.get("driver") == Some(&Value::from("igb"))
            && list.pointer("/netdevs/0/carrier") == Some(&Value::from(true)),
        "the physical function is shown otherwise: {list}"
    );
    let vfs = list.get("vfs").and_then(Value::as_array).context("no VFs")?;
    for vf in vfs {
        let n = vf.get("index").and_then(Value::as_u64).context("a VF without a number")?;
        let facts = host.sh(&format!(
            "d=/sys/bus/pci/devices/{address}/virtfn{n}; basename $(readlink -f $d); \
             basename $(readlink -f $d/driver); basename $(readlink -f $d/iommu_group); ls $d/net"
        ))?;
        let read: Vec<String> = ["/address", "/driver", "/iommu_group", "/netdevs/0/name"]
            .iter()
            .map(|path| {
                vf.pointer(path).map_or_else(String::new, |value| {
                    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
                })
            })
            .collect();
        ensure!(
            facts.split_whitespace().eq(read.iter().map(String::as_str)),
            "VF {n}: sysfs has {facts:?}, we read {read:?}"
        );
        let held = ip_vf(&shown, n)?;
        for (ours, theirs) in [
            ("/settings/max_tx_rate", "/rate/max_tx"),
            ("/settings/min_tx_rate", "/rate/min_tx"),
            ("/settings/spoof_check", "/spoofchk"),
            ("/settings/trust", "/trust"),
        ] {
            let (we, they) = (vf.pointer(ours), held.pointer(theirs));
            ensure!(we.is_some() && we == they, "VF {n}: {ours} is {we:?}, but ip says {they:?}");
        }
        let mac = vf.pointer("/settings/mac").and_then(Value::as_str).context("no MAC")?;
        ensure!(held.to_string().contains(mac), "VF {n}: we read the address {mac}, ip {held}");
    }
    Ok(())
}
