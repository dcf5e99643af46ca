//! Guests on an RNIC of their host: a VM stands for the host, rdma_rxe for its RNIC, and a second VM with plain rxe for a peer that is not ours.
//!
//! | part | what is looked at |
//! |---|---|
//! | `whole-stack` | every test of the virtual guest, its NICs backed by `rnic:rxe0`, over real sockets in the host VM |
//! | `pingpong` | `ibv_rc_pingpong` on plain rxe plays with a virtual guest, each as server and as client |
//!
//! Where rdma_rxe does otherwise than IBTA and our engine, [`KNOWN`] names the test, and the file and function of rxe that decides it. A test that fails and is not
//! listed is a failure; so is one that is listed and passes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::fixture;
use crate::cache::Cache;
use crate::exec::{run_logged, tied, workspace};
use crate::host;
use crate::roots::Debian;
use crate::rows::{self, Row};
use crate::vm::guest::{Guest, Output};
use crate::vm::{Lab, Nic, Plan, daemon, peers};

#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Release of the VMs
    #[arg(long, value_enum, default_value_t = Debian::Trixie)]
    debian: Debian,
    /// Only the rows whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// Keep consoles and logs when done
    #[arg(long)]
    keep: bool,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

/// What the build of the RNIC backing needs on this machine.
const PACKAGES: &[&str] = &["cmake", "libclang-dev", "libibverbs-dev"];
const BUILD_WAIT: Duration = Duration::from_secs(1800);
const SET_UP: Duration = Duration::from_secs(60);
/// One test has 16 minutes of its own at most, and a program of tests an hour: emulated, 20000 interrupts take their time.
const TESTS_END: Duration = Duration::from_secs(3600);
const PINGPONG: Duration = Duration::from_secs(120);
/// Addresses of virtual guests: 10.0.0.1 and on.
const ADDRESSES: u8 = 40;

/// Tests that cannot pass on rdma_rxe, and what decides that.
const KNOWN: &[(&str, &str)] = &[
    ("rc::counters_grow_by_the_bytes_that_moved", INBOUND),
    ("rc::the_first_message_in_rtr_raises_comm_est_and_is_received", NO_COMM_EST),
    ("errors::a_bad_local_key_is_a_local_protection_error", FLUSHED),
    ("errors::a_deregistered_key_is_dead", FLUSHED),
    ("errors::a_region_of_another_domain_is_a_local_protection_error", FLUSHED),
    ("errors::a_bad_remote_key_is_a_remote_access_error", SILENT),
    ("errors::a_remote_region_of_another_domain_is_a_remote_access_error", SILENT),
    ("errors::each_remote_right_is_needed_on_the_region", SILENT),
    ("errors::each_remote_right_is_needed_on_the_queue_pair", NOT_ENABLED),
    (
        "errors::a_receive_that_is_too_small_breaks_both_ends",
        "rxe_resp.c, send_data_in: ENOSPC is RESPST_ERR_MALFORMED_WQE, hence REM_OP_ERR and LOC_QP_OP_ERR",
    ),
    (
        "errors::a_receive_with_a_bad_element_breaks_both_ends",
        "rxe_resp.c, rxe_receiver: RESPST_ERR_MALFORMED_WQE completes with LOC_QP_OP_ERR",
    ),
    (
        "srq::receive_buffers_are_checked_in_the_domain_of_the_srq",
        "rxe_resp.c, send_data_in: checked in the domain of the QP",
    ),
    ("uc::a_send_error_leads_to_sqe_and_receives_go_on", FLUSHED),
    (
        "ud_gsi::a_datagram_arrives_with_its_ipv4_header",
        "rxe_net.c, rxe_loopback: the header of a packet to the same host never gets its checksum",
    ),
    (
        "ud_gsi::a_datagram_larger_than_the_mtu_is_refused_at_the_sender",
        "rxe_req.c, rxe_requester: drops it and completes with success (IBTA C10-93.1.1)",
    ),
    (
        "ud_gsi::a_receive_that_is_too_small_fails_at_the_receiver_only",
        "rxe_resp.c, rxe_receiver: a datagram that does not fit is dropped where there is no SRQ",
    ),
    ("events::an_event_carries_its_object_and_context", SILENT),
    ("events::comm_est_comes_once", NO_COMM_EST),
    ("events::without_buffers_each_object_keeps_one_event_of_each_type", NO_COMM_EST),
    ("cq_arm::an_error_is_not_kept_waiting", UNMODERATED),
    ("cq_arm::moderated_events_wait_for_the_count_or_the_period", UNMODERATED),
    (
        "cq_arm::solicited_arming_waits_for_a_solicited_message",
        "libibverbs does not tell whether a message was solicited (docs/RNIC.md, 3)",
    ),
    (
        "ud_gsi::a_datagram_between_ipv6_addresses_has_an_ipv6_header",
        "ibv_wc does not tell the version of the header; the NIC's first address decides (docs/RNIC.md, 3)",
    ),
    ("atomics::the_device_says_that_its_atomics_hold_against_cpus_and_they_do", AMONG_QPS),
    ("atomics::compare_and_swap_is_atomic_against_a_cpu_that_also_swaps", AMONG_QPS),
    ("memory::a_dma_key_covers_guest_physical_memory_and_is_the_kernels_alone", NOT_OFFERED),
    ("ud_gsi::gsi_belongs_to_the_kernel_and_exists_once", NOT_OFFERED),
    ("ud_gsi::gsi_is_queue_pair_one_and_carries_management_datagrams", NOT_OFFERED),
    ("ud_gsi::gsi_works_with_a_dma_key", NOT_OFFERED),
    (
        "isolation::another_network_is_out_of_reach_even_with_the_right_numbers",
        "refused where the connection is made (docs/RNIC.md, 2), not answered by silence",
    ),
];

const NO_COMM_EST: &str = "rxe_resp.c, rxe_receiver: no COMM_EST";
const UNMODERATED: &str = "CQ_MODERATE is not offered (docs/RNIC.md, 3)";
const AMONG_QPS: &str =
    "an RNIC claims IBV_ATOMIC_HCA: among its QPs, not against CPUs (docs/RNIC.md, 3)";
/// What libibverbs does not pass on.
const NOT_OFFERED: &str = "no GSI QP and no DMA key on an RNIC (docs/RNIC.md, 3)";
/// What comes in passes no software of ours.
const INBOUND: &str = "the RNIC counts what comes in, not the daemon (docs/RNIC.md, 4)";
const FLUSHED: &str = "rxe_req.c, rxe_requester: a local fault is rxe_qp_error() first, and rxe_comp.c, flush_send_wqe completes it with WR_FLUSH_ERR";
const SILENT: &str = "rxe_resp.c, do_class_ac_error: a NAK, and no QP_ACCESS_ERR";
const NOT_ENABLED: &str = "rxe_resp.c, check_rkey: an operation that the QP does not enable is RESPST_ERR_UNSUPPORTED_OPCODE, hence REM_INV_REQ_ERR";

/// The host's side: addresses for its guests on the netdev that carries rxe, and no limit on what may be pinned.
const HOST: &str = "set -e
ip link set eth0 mtu 4200
for n in $(seq 1 @ADDRESSES@); do ip addr add 10.0.0.$n/24 dev eth0; ip addr add fd00:1::$(printf %x $n)/64 dev eth0 nodad; done
sleep 2
";

/// Each test in a process of its own: one that hangs or dies takes no other with it.
const TESTS: &str = r#"ulimit -l unlimited
export VHOST_RDMA_BIN=/host/products/vhost-rdma VHOST_RDMA_BACKING=rnic:rxe0 VHOST_RDMA_PATIENCE=8
cp -f /host/products/@BINARY@ /tmp/t && chmod +x /tmp/t
for t in $(/tmp/t --list --format terse 2>/dev/null | sed -n 's/: test$//p'); do
  case "$t" in *@FILTER@*) ;; *) continue;; esac
  if timeout 1000 /tmp/t --exact "$t" > /tmp/log 2>&1; then
    grep -q '1 passed' /tmp/log && echo "ok $t" || echo "ignored $t"
  else
    echo "fail $t"; grep -v '^running\|^$\|^test \|^failures\|RUST_BACKTRACE' /tmp/log | head -25 | sed 's/^/    | /'
  fi
done
echo "end"
"#;

#[derive(Debug, Deserialize)]
struct Artifact {
    reason: String,
    executable: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
}

#[derive(Debug, Deserialize)]
struct Profile {
    test: bool,
}

/// The virtual guest's programs: those of its tests, and `pingpong`.
fn virtual_guest(cache: &Cache) -> Result<(Vec<PathBuf>, PathBuf)> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let list = cache.log("virtual-guest-artifacts");
    let script = format!(
        "\"$0\" test -q --locked -p virtual-guest --no-run --message-format json > '{0}' && \"$0\" build -q --locked -p virtual-guest --bin pingpong --message-format json >> '{0}'",
        list.display()
    );
    let mut cmd = tied("sh");
    cmd.current_dir(workspace()).args(["-ec", &script]).arg(cargo);
    let log = cache.log("virtual-guest-build");
    run_logged(&mut cmd, "building the virtual guest", &log, BUILD_WAIT)?;
    let text = std::fs::read_to_string(&list)?;
    let made = text.lines().filter_map(|line| serde_json::from_str::<Artifact>(line).ok());
    let (mut tests, mut pingpong) = (Vec::new(), None);
    for artifact in made.filter(|artifact| artifact.reason == "compiler-artifact") {
        let Artifact {
            executable: Some(path), target: Some(target), profile: Some(profile), ..
        } = artifact
        else {
            continue;
        };
        if target.name == "pingpong" && !profile.test {
            pingpong = Some(path);
        } else if profile.test && path.to_string_lossy().contains("/deps/") {
            tests.push(path);
        }
    }
    Ok((tests, pingpong.context("cargo left no pingpong program")?))
}

impl Args {
    pub(crate) fn run(&self, cache: &Cache) -> Result<bool> {
        let mut lab = Lab::prepare(cache)?;
        if self.keep {
            lab.run.keep();
        }
        host::ensure_packages(cache, PACKAGES)?;
        let binary = daemon::build_with(cache, &["host-rnic"])?;
        let (tests, pingpong) = virtual_guest(cache)?;
        let plan =
            Plan { image: lab.image(self.debian)?, cpus: 1, nics: vec![Nic::None, Nic::None] };
        lab.boot(&plan)?;
        let mut products = vec![binary, pingpong];
        products.extend(tests.iter().cloned());
        lab.deliver(&products)?;
        let mut table = Vec::new();
        {
            let (a, b) = lab.pair()?;
            let set_up = HOST.replace("@ADDRESSES@", &ADDRESSES.to_string());
            a.must(&set_up, SET_UP)?;
            b.must("ip link set eth0 mtu 4200; ip addr add 10.0.0.200/24 dev eth0", SET_UP)?;
            let _devices = peers::attach_rxe(a, b)?;
            for program in &tests {
                self.whole_stack(a, program, &mut table)?;
            }
            self.pingpong(a, b, &mut table)?;
        }
        for guest in &mut lab.guests {
            let clean = fixture::kernel_is_clean(guest);
            table.push(row(&format!("kernel of {}", guest.name), clean));
        }
        rows::print_table(&table, "rnic:rxe0", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(table.iter().all(|row| row.ok))
    }

    fn wanted(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    /// The tests of one program, one row each.
    fn whole_stack(&self, host: &mut Guest, program: &Path, table: &mut Vec<Row>) -> Result<()> {
        let file = program.file_name().context("a program has a name")?.to_string_lossy();
        let suite = file.rsplit_once('-').map_or(&*file, |(name, _)| name);
        let filter = match &self.only {
            Some(only) if suite.contains(only.as_str()) => "",
            Some(only) => only.as_str(),
            None => "",
        };
        let script = TESTS.replace("@BINARY@", &file).replace("@FILTER@", filter);
        let out = host.run(&script, TESTS_END)?;
        let mut ended = false;
        for line in out.text.lines() {
            match line.split_once(' ') {
                Some((verdict @ ("ok" | "fail"), name)) => {
                    let ok = judge(suite, name, verdict == "ok");
                    table.push(row(&format!("{suite}::{name}"), ok));
                }
                None if line == "end" => ended = true,
                _ => eprintln!("{line}"),
            }
        }
        if !ended {
            table.push(row(&format!("{suite} (its end)"), false));
        }
        Ok(())
    }

    /// `ibv_rc_pingpong` on plain rxe with a virtual guest, both ways.
    fn pingpong(&self, host: &mut Guest, peer: &mut Guest, table: &mut Vec<Row>) -> Result<()> {
        const OURS: &str = "ulimit -l unlimited; export VHOST_RDMA_BIN=/host/products/vhost-rdma VHOST_RDMA_BACKING=rnic:rxe0
exec /host/products/pingpong --address 10.0.0.1 --peer 10.0.0.200 ";
        let theirs = "ulimit -l unlimited
gid=$(for f in /sys/class/infiniband/rxe0/ports/1/gids/*; do grep -q 'ffff:0a00:00c8' $f && basename $f && break; done)
exec ibv_rc_pingpong -d rxe0 -g $gid -c ";
        if self.wanted("pingpong: rxe serves") {
            let server = peer.spawn(theirs)?;
            peer.run("n=0; until grep -qi ':4853 ' /proc/net/tcp /proc/net/tcp6; do sleep 0.1; n=$((n+1)); [ $n -lt 100 ] || exit 1; done", SET_UP)?;
            let client = host.run(&format!("{OURS} --connect 10.0.0.200:18515"), PINGPONG)?;
            let served = peer.wait(server, PINGPONG)?;
            table.push(both("pingpong: rxe serves", &client, &served));
        }
        if self.wanted("pingpong: the guest serves") {
            let server = host.spawn(OURS)?;
            host.run("n=0; until grep -qi ':4853 ' /proc/net/tcp; do sleep 0.1; n=$((n+1)); [ $n -lt 300 ] || exit 1; done", SET_UP)?;
            let client = peer.run(&format!("{theirs} 10.0.0.1"), PINGPONG)?;
            let served = host.wait(server, PINGPONG)?;
            table.push(both("pingpong: the guest serves", &client, &served));
        }
        Ok(())
    }
}

/// A row of two programs that must both end well.
fn both(name: &str, client: &Output, server: &Output) -> Row {
    let ok = client.ok() && server.ok() && client.text.contains("usec/iter");
    eprintln!("{name}: client {:?}, server {:?}", client.status, server.status);
    eprintln!("{}\n{}", client.text.trim_end(), server.text.trim_end());
    row(name, ok)
}

fn judge(suite: &str, name: &str, passed: bool) -> bool {
    let full = format!("{suite}::{name}");
    match KNOWN.iter().find(|(test, _)| *test == full) {
        Some((_, why)) if passed => {
            eprintln!(
                "{full} passes, but is listed as one that cannot ({why}): take it off the list"
            );
            false
        }
        Some((_, why)) => {
            eprintln!("    {full}: as known: {why}");
            true
        }
        None => {
            if !passed {
                eprintln!("{full} FAILED");
            }
            passed
        }
    }
}

fn row(name: &str, ok: bool) -> Row {
    Row {
        name: name.to_owned(),
        ok,
        value: None,
        reference: None,
        ratio: None,
        unit: String::new(),
        target: String::new(),
    }
}
