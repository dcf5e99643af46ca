//! SR-IOV on QEMU's emulated NIC (igb, an Intel 82576) behind an emulated IOMMU: `vhost-rdma vf`
//! from end to end, and the RDMA netlink crate beside the tools of iproute2.
//!
//! The guest is the host here: our program runs inside it, on its kernel. What it says is held
//! against sysfs and against `ip` and `rdma`, never against itself.

mod compare;
mod crash;
mod nic;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::cache::Cache;
use crate::exec::{self, run_logged, tied, workspace};
use crate::roots::Debian;
use crate::rows::{self, Row};
use crate::vm::guest::{self, Guest, Output};
use crate::vm::{Lab, MEMORY_MIB, NAMES, Nic, Plan};

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Release of the guest
    #[arg(long, value_enum, default_value_t = Debian::Trixie)]
    debian: Debian,
    /// Only the steps whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
    /// Keep consoles and logs when done
    #[arg(long)]
    keep: bool,
}

/// Making VFs under TCG takes a second, a driver's probe too; a busy host makes minutes of it.
const WAIT: Duration = Duration::from_secs(300);
const BUILD_WAIT: Duration = Duration::from_secs(1800);

/// The guest with its NIC.
struct Host {
    lab: Lab,
    /// Interface of the physical function.
    pf: String,
    address: String,
}

type Step = (&'static str, fn(&mut Host) -> Result<()>);

const STEPS: &[Step] = &[
    ("rdma netlink says what `rdma` says", compare::rdma),
    ("rdma netlink changes what it shall", compare::changes),
    ("VFs created and listed", Host::create),
    ("VF set: rate, address, VLAN, trust", Host::set),
    ("refusals", Host::refusals),
    ("VF to vfio-pci and back", Host::vfio),
    ("VF carries an RDMA device", Host::carrier),
    ("NIC on a VF's RDMA device: the guest calls rxe", nic::calls),
    ("NIC on a VF's RDMA device: rxe calls the guest", nic::serves),
    ("commands at once", Host::at_once),
    ("killed while creating", crash::create),
    ("killed while setting", crash::set),
    ("killed while binding", crash::bind),
    ("killed while unbinding", crash::unbind),
    ("killed while removing", crash::remove),
    ("nothing is left", Host::nothing_left),
];

impl Args {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let mut lab = Lab::prepare(cache)?;
        if self.keep {
            lab.run.keep();
            eprintln!("    consoles and logs stay in {}", lab.run.path().display());
        }
        let mut products = nic::products(cache, self.debian)?;
        products.push(build(cache)?);
        let [here, there] = [0, 1].map(|n| guest::cable(lab.run.path(), NAMES[n]));
        let options = options(&here, &there);
        lab.boot(&Plan {
            image: lab.image(self.debian)?,
            cpus: 1,
            nics: vec![Nic::Options(options), Nic::None],
        })?;
        lab.deliver(&products)?;
        let mut host = Host::prepare(lab)?;
        let mut table = Vec::new();
        for (name, step) in STEPS
            .iter()
            .filter(|(name, _)| self.only.as_ref().is_none_or(|only| name.contains(only.as_str())))
        {
            let start = Instant::now();
            let result = step(&mut host);
            exec::check_interrupt()?;
            let seconds = start.elapsed().as_secs_f64();
            match &result {
                Ok(()) => eprintln!("    {name}: ok ({seconds:.1} s)"),
                Err(error) => eprintln!("    {name}: FAILED\n{error:#}"),
            }
            table.push(Row::timed(*name, result.is_ok(), seconds));
        }
        let clean = host.kernel_is_clean()?;
        rows::print_table(&table, "seconds", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(clean && table.iter().all(|row| row.ok))
    }
}

/// The example that prints what the crate reads; a debug build does, nothing here is timed.
fn build(cache: &Cache) -> Result<PathBuf> {
    let mut cmd = tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cmd.current_dir(workspace()).args(["build", "--locked", "-p", "rdma-netlink"]);
    cmd.args(["--example", "rdma-json"]);
    run_logged(&mut cmd, "building the comparison", &cache.log("sriov-build"), BUILD_WAIT)?;
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace().join("target"), PathBuf::from)
        .join("debug");
    Ok(target.join("examples/rdma-json"))
}

/// The IOMMU must be there for vfio-pci, without interrupt remapping: with it the kernel panics at
/// boot if the host is too busy for its timer check; the root port has the access control that puts
/// each VF into a group of its own. The cable to the peer is that of the NIC with functions.
fn options(here: &Path, there: &Path) -> Vec<String> {
    let (here, there) = (here.display(), there.display());
    let cable = |n: u8, local: &str, remote: &str| {
        format!(
            "dgram,id=n{n},local.type=unix,local.path={local},remote.type=unix,remote.path={remote}"
        )
    };
    let nowhere = cable(0, &format!("{here}0"), &format!("{here}0.none"));
    let to_peer = cable(1, &here.to_string(), &there.to_string());
    [
        "-M",
        "q35,memory-backend=mem",
        "-m",
        &format!("{MEMORY_MIB}M"),
        "-object",
        &format!("memory-backend-memfd,id=mem,size={MEMORY_MIB}M,share=on"),
        "-device",
        "intel-iommu,intremap=off",
        "-netdev",
        &nowhere,
        "-device",
        &format!("virtio-net-pci,netdev=n0,mac={}", guest::mac(1)),
        "-device",
        "pcie-root-port,id=rp0,slot=1",
        "-netdev",
        &to_peer,
        "-device",
        "igb,bus=rp0,netdev=n1,mac=52:54:00:00:01:01",
    ]
    .map(str::to_owned)
    .to_vec()
}

impl Host {
    fn prepare(mut lab: Lab) -> Result<Self> {
        let setup = "set -e
            cp /host/products/vhost-rdma /host/products/rdma-json /usr/local/bin/
            ip link set eth0 down
            modprobe -a igb igbvf vfio-pci rdma_rxe ib_uverbs rdma_ucm
            for d in /sys/bus/pci/devices/*; do
              [ -e $d/sriov_totalvfs ] && [ -d $d/net ] || continue
              pf=$(ls $d/net); ip link set $pf up
              for n in $(seq 50); do [ \"$(cat /sys/class/net/$pf/carrier)\" = 1 ] && break; \
                  sleep 0.2; done
              echo ${d##*/} $pf $(cat /sys/class/net/$pf/carrier); ls /sys/kernel/iommu_groups | \
                  wc -l
            done";
        let guest = lab.guests.first_mut().context("no guest")?;
        let said = guest.must(setup, WAIT)?;
        let words: Vec<&str> = said.split_whitespace().collect();
        let [.., address, pf, carrier, groups] = words.as_slice() else {
            bail!("no NIC with SR-IOV in the guest: {said}")
        };
        ensure!(*carrier == "1", "the emulated NIC has no carrier: {said}");
        ensure!(
            *groups != "0",
            "the guest's kernel has not switched the IOMMU on (intel_iommu=on)"
        );
        let (pf, address) = ((*pf).to_owned(), (*address).to_owned());
        Ok(Self { lab, pf, address })
    }

    fn guest(&mut self) -> Result<&mut Guest> {
        self.lab.guests.first_mut().context("no guest")
    }

    fn sh(&mut self, script: &str) -> Result<String> {
        self.guest()?.must(script, WAIT)
    }

    /// Output of a command that must print JSON, and nothing else.
    fn ask(&mut self, command: &str) -> Result<Value> {
        let text = self.sh(command)?;
        serde_json::from_str(&text).with_context(|| format!("{command} printed no JSON: {text}"))
    }

    /// `vhost-rdma --json vf …`, which must succeed.
    fn vf(&mut self, args: &str) -> Result<Value> {
        self.ask(&format!("vhost-rdma --json vf {args}"))
    }

    /// The physical function as `vf list` shows it.
    fn list(&mut self) -> Result<Value> {
        let pf = self.pf.clone();
        let list = self.vf(&format!("list {pf}"))?;
        list.get(0).cloned().context("vf list shows nothing")
    }

    /// A command that must end with this status and say this.
    fn fails(&mut self, args: &str, status: i32, says: &str) -> Result<()> {
        let Output { status: ended, text } =
            self.guest()?.run(&format!("vhost-rdma --json vf {args} < /dev/null"), WAIT)?;
        ensure!(
            ended == Some(status) && text.contains(says),
            "vf {args}: ended with {ended:?} instead of {status}, or did not say {says:?}: {text}"
        );
        Ok(())
    }

    /// The driver of VF `n`, as sysfs has it.
    fn driver(&mut self, n: u32) -> Result<String> {
        let (pci, n) = (&self.address, n);
        let script = format!(
            "d=/sys/bus/pci/devices/{pci}/virtfn{n}/driver; if [ -e $d ]; \
             then basename $(readlink -f $d); else echo none; fi"
        );
        Ok(self.sh(&script)?.trim().to_owned())
    }

    fn create(&mut self) -> Result<()> {
        let pf = self.pf.clone();
        self.vf(&format!("create {pf} 3"))?;
        let count = self.sh(&format!("cat /sys/bus/pci/devices/{}/sriov_numvfs", self.address))?;
        ensure!(count.trim() == "3", "the kernel has {count} VFs");
        for n in 0..3 {
            ensure!(self.driver(n)? == "igbvf", "VF {n} has no driver");
        }
        compare::inventory(self)
    }

    fn set(&mut self) -> Result<()> {
        let pf = self.pf.clone();
        self.vf(&format!(
            "set {pf}/1 --max-tx-rate 100 --mac 52:54:00:00:02:01 --vlan 17 --vlan-qos 3 \
             --trust on --spoof-check off"
        ))?;
        let held = self.ask(&format!("ip -j -d link show dev {pf}"))?;
        let vf = compare::ip_vf(&held, 1)?;
        ensure!(
            vf.pointer("/rate/max_tx") == Some(&Value::from(100)),
            "ip shows another rate: {vf}"
        );
        ensure!(vf.to_string().contains("52:54:00:00:02:01"), "ip shows another address: {vf}");
        ensure!(
            vf.get("spoofchk") == Some(&Value::from(false))
                && vf.get("trust") == Some(&Value::from(true)),
            "ip shows other flags: {vf}"
        );
        ensure!(vf.to_string().contains("\"vlan\":17"), "ip shows another VLAN: {vf}");
        compare::inventory(self)?;
        // What the NIC cannot do is said in its words, and what was set before it is put back.
        self.fails(
            &format!("set {pf}/1 --mac 52:54:00:00:02:02 --max-tx-rate 5000"),
            1,
            "transmit rate of VF 1",
        )?;
        let held = self.ask(&format!("ip -j -d link show dev {pf}"))?;
        ensure!(
            compare::ip_vf(&held, 1)?.to_string().contains("52:54:00:00:02:01"),
            "a refused change left half of itself"
        );
        self.vf(&format!(
            "set {pf}/1 --max-tx-rate 0 --vlan 0 --vlan-qos 0 --trust off --spoof-check on"
        ))?;
        Ok(())
    }

    fn refusals(&mut self) -> Result<()> {
        let pf = self.pf.clone();
        self.fails(&format!("create {pf} 99"), 2, "can have")?;
        self.fails("create nothing0 1", 4, "no physical function")?;
        self.fails(&format!("show {pf}/7"), 4, "no virtual function")?;
        self.fails(&format!("create {pf} 0"), 2, "--yes")?;
        self.fails(&format!("set {pf}/0"), 2, "nothing to change")?;
        self.sh(&format!(
            "i=$(ls /sys/bus/pci/devices/{}/virtfn0/net); ip addr add 10.77.0.1/24 dev $i",
            self.address
        ))?;
        self.fails(&format!("create {pf} 0 --yes"), 5, "10.77.0.1/24")?;
        self.fails(&format!("bind {pf}/0"), 5, "10.77.0.1/24")?;
        self.sh(&format!(
            "i=$(ls /sys/bus/pci/devices/{}/virtfn0/net); ip addr del 10.77.0.1/24 dev $i; \
             ip netns add blue; ip link set $i netns blue",
            self.address
        ))?;
        self.fails(&format!("bind {pf}/0"), 5, "another namespace")?;
        // The interface of a namespace that goes comes home by itself, in its own time.
        self.sh(&format!(
            "ip netns del blue; for n in $(seq 50); do \
             [ -n \"$(ls /sys/bus/pci/devices/{}/virtfn0/net)\" ] && exit; sleep 0.2; done; exit 1",
            self.address
        ))?;
        Ok(())
    }

    fn vfio(&mut self) -> Result<()> {
        let pf = self.pf.clone();
        let bound = self.vf(&format!("bind {pf}/2"))?;
        ensure!(self.driver(2)? == "vfio-pci", "VF 2 is not bound to vfio-pci");
        let text =
            |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
        let (group, address) = (text(bound.get("vfio_group")), text(bound.get("address")));
        self.sh(&format!("test -c {group}"))?;
        ensure!(
            bound
                .pointer("/qemu/1")
                .and_then(Value::as_str)
                .is_some_and(|option| option.contains(&format!("host={address}"))),
            "no QEMU option in {bound}"
        );
        ensure!(
            bound
                .pointer("/cloud_hypervisor/1")
                .and_then(Value::as_str)
                .is_some_and(|option| option.contains(&address)),
            "no cloud-hypervisor option in {bound}"
        );
        // A VMM has it open.
        self.sh(&format!("sleep 1000 9<>{group} >/dev/null 2>&1 & echo $! > /tmp/vmm; sleep 0.5"))?;
        self.fails(&format!("unbind {pf}/2"), 5, "has /dev/vfio/")?;
        self.fails(&format!("create {pf} 0 --yes"), 5, "has /dev/vfio/")?;
        self.sh("kill $(cat /tmp/vmm); sleep 0.2")?;
        self.vf(&format!("unbind {pf}/2"))?;
        ensure!(self.driver(2)? == "igbvf", "VF 2 is not back with its driver");
        let forced = self.sh(&format!("cat /sys/bus/pci/devices/{address}/driver_override"))?;
        ensure!(matches!(forced.trim(), "" | "(null)"), "a driver is still demanded: {forced}");
        Ok(())
    }

    fn carrier(&mut self) -> Result<()> {
        let pf = self.pf.clone();
        self.with_rdma_device(|host, device| {
            let shown = host.vf(&format!("show {device}"))?;
            ensure!(
                shown.get("index") == Some(&Value::from(0)),
                "the RDMA device is shown on another function: {shown}"
            );
            ensure!(
                shown.pointer("/rdma_devices/0/software") == Some(&Value::from(true)),
                "rxe is shown as hardware: {shown}"
            );
            host.fails(&format!("create {pf} 0 --yes"), 5, device)?;
            host.sh(&format!(
                "timeout 100 ibv_rc_pingpong -d {device} -g 0 >/dev/null 2>&1 & sleep 2"
            ))?;
            let shown = host.vf(&format!("show {device}"))?;
            ensure!(
                shown.to_string().contains("ibv_rc_pingpong"),
                "the program that has it open is not shown: {shown}"
            );
            host.sh("pkill -x ibv_rc_pingpong; sleep 0.5").map(|_| ())
        })?;
        let shown = self.vf(&format!("show {pf}/0"))?;
        ensure!(
            shown.pointer("/rdma_devices/0").is_none(),
            "a deleted RDMA device is shown: {shown}"
        );
        Ok(())
    }

    /// VF 0 with an RDMA device on it, as long as `work` takes: what can back a NIC
    /// (`--backing rnic:DEVICE`). It is an rxe: the emulated NIC has no RDMA of its own.
    fn with_rdma_device(&mut self, work: impl FnOnce(&mut Self, &str) -> Result<()>) -> Result<()> {
        self.sh(&format!(
            "set -e; i=$(ls /sys/bus/pci/devices/{}/virtfn0/net); ip link set $i up; \
             rdma link add rxevf type rxe netdev $i; ibv_devinfo -d rxevf",
            self.address
        ))?;
        let result = work(self, "rxevf");
        self.sh("rdma link delete rxevf")?;
        result
    }

    /// Commands for one physical function wait for each other, and each does its work.
    fn at_once(&mut self) -> Result<()> {
        let pf = self.pf.clone();
        self.sh(&format!(
            "pids=; for n in 0 1 2; do \
             vhost-rdma vf set {pf}/$n --max-tx-rate 1$n & pids=\"$pids $!\"; \
             vhost-rdma vf bind {pf}/$n & pids=\"$pids $!\"; done; \
             for p in $pids; do wait $p || exit 1; done"
        ))?;
        let list = self.list()?;
        for n in 0..3_u64 {
            let vf = list.pointer(&format!("/vfs/{n}")).context("a VF is missing")?;
            ensure!(
                vf.get("driver") == Some(&Value::from("vfio-pci")),
                "VF {n} is not bound: {vf}"
            );
            ensure!(
                vf.pointer("/settings/max_tx_rate") == Some(&Value::from(10 + n)),
                "VF {n} has another rate: {vf}"
            );
        }
        self.sh(&format!(
            "for n in 0 1 2; do vhost-rdma vf unbind {pf}/$n || exit 1; vhost-rdma vf set {pf}/$n \
             --max-tx-rate 0 || exit 1; done"
        ))?;
        Ok(())
    }

    fn nothing_left(&mut self) -> Result<()> {
        let pf = self.pf.clone();
        self.vf(&format!("create {pf} 0 --yes"))?;
        let recovered = self.vf("recover")?;
        ensure!(
            recovered.as_array().is_some_and(Vec::is_empty),
            "something was pending: {recovered}"
        );
        let left = self.sh(&format!(
            "cat /sys/bus/pci/devices/{}/sriov_numvfs; lspci -D 2>/dev/null; \
             for d in /sys/bus/pci/devices/*; do [ -e $d/physfn ] && echo $d; \
             [ \"$(readlink -f $d/driver)\" = /sys/bus/pci/drivers/vfio-pci ] && echo $d; done; \
             ls /var/lib/vhost-rdma/sriov/*.new 2>/dev/null; true",
            self.address
        ))?;
        ensure!(left.trim() == "0", "left behind: {left}");
        Ok(())
    }

    /// A soft lockup says that the emulated CPU was not scheduled, nothing about the guest.
    fn kernel_is_clean(&mut self) -> Result<bool> {
        let said = self.sh("dmesg | grep -v 'soft lockup' | grep -E -A20 \
                            'BUG:|Oops|WARNING:|hung_task|DMAR:.*fault' | head -60; true")?;
        if !said.trim().is_empty() {
            eprintln!("the guest's kernel complained:\n{said}");
        }
        Ok(said.trim().is_empty())
    }
}
