//! Plugging and unplugging of the NIC and of memory through QEMU's monitor.
//!
//! A device can be unplugged only from a port of its own. The root ports reserve room for the NIC's
//! notify pages: firmware gives an empty port 2 MiB, a NIC with a page for each queue wants 4.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

use super::{Life, NICS, SHORT};
use crate::exec;
use crate::vm::qmp::Qmp;

const NIC: &str = "vhost-user-test-device-pci,";
const NETDEV: &str = "virtio-net-pci,";
/// Where QEMU's q35 puts the first plugged memory: 4 GiB, in frames.
const PLUGGED_PFN: &str = "0x100000";

/// The daemon's options with NIC and netdev on ports of their own, room for more memory, and a
/// machine that can sleep.
pub(super) fn pluggable(options: Vec<String>) -> Vec<String> {
    let words = [
        "-device",
        "pcie-root-port,id=rp0,chassis=1,slot=1,pref64-reserve=32M",
        "-device",
        "pcie-root-port,id=rp1,chassis=2,slot=2",
        "-global",
        "ICH9-LPC.disable_s3=0",
    ];
    let mut out: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
    for option in options {
        if option.starts_with(NIC) {
            out.push(option + ",bus=rp0,id=rnic");
        } else if option.starts_with(NETDEV) {
            out.push(option + ",bus=rp1,id=net");
        } else {
            out.push(option);
        }
    }
    out.extend(["-m", "slots=4,maxmem=4G"].map(String::from));
    out
}

/// `driver,key=value,…` as the monitor takes it.
fn device(option: &str) -> Result<Map<String, Value>> {
    let mut words = option.split(',');
    let mut out = Map::new();
    out.insert("driver".into(), words.next().context("an empty option")?.into());
    for word in words {
        let (key, value) = word.split_once('=').with_context(|| format!("{word} in {option}"))?;
        let value = match (value, value.parse::<u64>()) {
            ("on", _) => true.into(),
            (_, Ok(number)) => number.into(),
            _ => value.into(),
        };
        out.insert(key.into(), value);
    }
    Ok(out)
}

impl Life {
    /// Takes the NIC out of guest `n` and its connection out of QEMU.
    pub(super) fn unplug_nic(&mut self, n: usize) -> Result<Qmp> {
        let mut monitor = self.guest(n)?.monitor()?;
        monitor.unplug("rnic")?;
        monitor.execute("chardev-remove", &json!({ "id": "vrdma0" }))?;
        Ok(monitor)
    }

    /// Gives guest `n` the NIC that the daemon has for it.
    pub(super) fn plug_nic(&mut self, n: usize, monitor: &mut Qmp) -> Result<()> {
        let nic = NICS.get(n).context("no such NIC")?;
        let nowhere = std::path::Path::new("/nowhere");
        let options = self.fixture.daemon.qemu_args(nic, nowhere, nowhere)?;
        let find = |start: &str| {
            let found = options.iter().find(|o| o.starts_with(start));
            found.with_context(|| format!("no {start} in {options:?}"))
        };
        let socket = find("socket,")?.split("path=").nth(1).context("a socket without a path")?;
        let address = json!({ "type": "unix", "data": { "path": socket } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        monitor.execute("chardev-add", &json!({ "id": "vrdma0", "backend": backend }))?;
        let mut device = device(find(NIC)?)?;
        device.insert("id".into(), "rnic".into());
        device.insert("bus".into(), "rp0".into());
        monitor.execute("device_add", &device.into())?;
        Ok(())
    }

    pub(super) fn replug_nic(&mut self) -> Result<()> {
        for _ in 0..2 {
            let holders = self.hold(0, &["poll", "sleep", "busy"])?;
            let (client, server) = self.load()?;
            let start = Instant::now();
            let mut monitor = self.unplug_nic(0)?;
            self.must_flush(0, &holders, start, SHORT)?;
            self.must_end(0, client)?;
            self.end(1, server)?;
            exec::wait_for("the daemon to see that the NIC is unplugged", SHORT, || {
                Ok((self.fixture.daemon.nic(NICS[0])?.session == "absent").then_some(()))
            })?;
            self.wait_empty(NICS[0], false)?;
            self.plug_nic(0, &mut monitor)?;
            self.reattach()?;
        }
        Ok(())
    }

    fn plug_dimm(&mut self, monitor: &mut Qmp, id: &str) -> Result<()> {
        let before = self.memory()?;
        let backend = json!({
            "qom-type": "memory-backend-memfd", "id": format!("{id}m"), "size": 256 << 20,
            "share": true
        });
        monitor.execute("object-add", &backend)?;
        monitor.execute(
            "device_add",
            &json!({ "driver": "pc-dimm", "id": id, "memdev": format!("{id}m") }),
        )?;
        exec::wait_for("the guest to take its new memory", SHORT, || {
            std::thread::sleep(Duration::from_millis(200));
            Ok((self.memory()? > before + (200 << 10)).then_some(()))
        })
    }

    /// MemTotal in KiB.
    fn memory(&mut self) -> Result<u64> {
        let text = self
            .guest(0)?
            .must("sed -n 's/MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo", SHORT)?;
        text.trim().parse().with_context(|| format!("MemTotal is {text:?}"))
    }

    /// A region in new memory works; memory comes and goes while it is used.
    pub(super) fn plug_memory(&mut self) -> Result<()> {
        let (client, server) = self.load()?;
        let mut monitor = self.guest(0)?.monitor()?;
        // As kernels of distributions do by themselves.
        self.guest(0)?
            .must("echo online > /sys/devices/system/memory/auto_online_blocks", SHORT)?;
        self.plug_dimm(&mut monitor, "d1")?;
        let device = self.devices.options(0);
        let check = format!("exec /host/products/vrdma-life {device} -p {PLUGGED_PFN}");
        let guest = self.guest(0)?;
        guest.must(&format!("{check} memory"), SHORT)?;
        let user = guest.spawn(&format!("{check} -s 12 memory"))?;
        // Movable, or the kernel would put something there that stays.
        guest.must("echo online_movable > /sys/devices/system/memory/auto_online_blocks", SHORT)?;
        self.plug_dimm(&mut monitor, "d2")?;
        self.must_flow()?;
        monitor.unplug("d2")?;
        monitor.execute("object-del", &json!({ "id": "d2m" }))?;
        let guest = self.guest(0)?;
        let out = guest.wait(user, SHORT)?;
        if !out.ok() {
            bail!("with memory coming and going: {:?}\n{}", out.status, out.text);
        }
        self.must_flow()?;
        self.guest(0)?.kill(client)?;
        self.end(1, server)
    }
}
