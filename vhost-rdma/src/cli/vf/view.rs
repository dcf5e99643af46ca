//! What `vf` shows.

use rdma_netlink::sriov::{
    Function, Operation, Outcome, PhysicalFunction, Recovered, User, VirtualFunction,
};
use serde::Serialize;

use crate::cli::view::{Show, columns};
use vhost_rdma_vmm as vmm;

/// A physical function; the field names are a promise to scripts.
#[derive(Debug, Serialize)]
pub(super) struct PfView {
    #[serde(flatten)]
    function: Function,
    total_vfs: u32,
    vf_count: u32,
    vfs: Vec<VfView>,
    /// An operation that has begun and not ended.
    interrupted: Option<Operation>,
}

/// A virtual function.
#[derive(Debug, Serialize)]
pub(super) struct VfView {
    #[serde(flatten)]
    pub(super) vf: VirtualFunction,
    pub(super) users: Vec<User>,
}

/// A virtual function that was just changed: the same JSON.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct Done(pub(super) VfView);

/// A virtual function that was just given to vfio-pci.
#[derive(Debug, Serialize)]
pub(super) struct Bound {
    #[serde(flatten)]
    pub(super) vf: VfView,
    pub(super) qemu: Vec<String>,
    pub(super) cloud_hypervisor: Vec<String>,
}

/// What was interrupted, and how it ended.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct RecoveredView(pub(super) Vec<Recovered>);

impl PfView {
    pub(super) fn new(
        pf: PhysicalFunction,
        vfs: Vec<VfView>,
        interrupted: Option<Operation>,
    ) -> Self {
        Self {
            function: pf.function,
            total_vfs: pf.total_vfs,
            vf_count: pf.vf_count,
            vfs,
            interrupted,
        }
    }

    fn row(&self) -> [String; 11] {
        let vfs = format!("{}/{} VFs", self.vf_count, self.total_vfs);
        common(
            self.function.address.to_string(),
            &self.function,
            [vfs, String::new(), String::new(), String::new()],
            String::new(),
        )
    }
}

/// `FUNCTION … MAC`, then what the physical function holds, then who uses it.
fn common(name: String, function: &Function, held: [String; 4], used: String) -> [String; 11] {
    let dash = |text: Option<String>| {
        text.filter(|text| !text.is_empty()).unwrap_or_else(|| "-".to_owned())
    };
    let names = |list: Vec<&str>| dash(Some(list.join(",")));
    let [mac, rate, spoof, trust] = held;
    [
        name,
        dash(function.driver.clone()),
        names(function.netdevs.iter().map(|netdev| netdev.name.as_str()).collect()),
        names(function.rdma_devices.iter().map(|device| device.name.as_str()).collect()),
        dash(function.numa_node.map(|node| node.to_string())),
        dash(function.netdevs.first().and_then(|netdev| netdev.state.clone())),
        mac,
        rate,
        spoof,
        trust,
        used,
    ]
}

impl VfView {
    fn row(&self) -> [String; 11] {
        let vf = &self.vf;
        let (mac, rate) = (self.mac(), self.rate());
        let word = |on: Option<bool>| on.map_or("-", |on| if on { "on" } else { "off" }).to_owned();
        let settings = vf.settings.as_ref();
        let held = [
            mac,
            rate,
            word(settings.and_then(|s| s.spoof_check)),
            word(settings.and_then(|s| s.trust)),
        ];
        let used = if self.users.is_empty() { "no" } else { "yes" };
        common(format!("  {} {}", vf.index, vf.address), &vf.function, held, used.to_owned())
    }

    fn mac(&self) -> String {
        let mac = self.vf.settings.as_ref().and_then(|settings| settings.mac.clone());
        mac.filter(|mac| !mac.is_zero()).map_or_else(|| "its own".to_owned(), |mac| mac.to_string())
    }

    fn rate(&self) -> String {
        let Some(settings) = &self.vf.settings else { return "-".to_owned() };
        match (settings.min_tx_rate.unwrap_or(0), settings.max_tx_rate.unwrap_or(0)) {
            (0, 0) => "unlimited".to_owned(),
            (0, max) => format!("{max} Mbit/s"),
            (min, 0) => format!("{min}.. Mbit/s"),
            (min, max) => format!("{min}..{max} Mbit/s"),
        }
    }

    fn rows(&self) -> Vec<[String; 2]> {
        let vf = &self.vf;
        let row = |key: &str, value: String| [key.to_owned(), value];
        let cells = self.row();
        let [_, driver, netdev, rdma, numa, link, mac, rate, spoof, trust, _] = cells;
        let mut rows = vec![
            row("function", vf.address.to_string()),
            row("physical function", format!("{}, number {}", vf.pf, vf.index)),
            row("id", format!("{:04x}:{:04x}", vf.vendor, vf.device)),
            row("driver", driver),
            row("network interface", netdev),
            row("link", link),
            row("RDMA device", rdma),
            row("NUMA node", numa),
            row(
                "IOMMU group",
                vf.iommu_group.map_or_else(|| "-".to_owned(), |group| group.to_string()),
            ),
            row("MAC", mac),
            row("transmit rate", rate),
            row("spoof check", spoof),
            row("trust", trust),
        ];
        if let Some(settings) = &vf.settings {
            let vlan = settings.vlan.filter(|vlan| *vlan != 0).map(|vlan| vlan.to_string());
            rows.push(row("VLAN", vlan.unwrap_or_else(|| "none".to_owned())));
            rows.extend(settings.link_state.map(|state| row("link state", state.to_string())));
            rows.extend(settings.node_guid.map(|guid| row("node GUID", guid.to_string())));
            rows.extend(settings.port_guid.map(|guid| row("port GUID", guid.to_string())));
        }
        rows.extend(vf.vfio_group.iter().map(|group| row("VFIO group", group.clone())));
        let users = if self.users.is_empty() {
            vec!["no".to_owned()]
        } else {
            self.users.iter().map(ToString::to_string).collect()
        };
        rows.extend(users.into_iter().map(|user| row("in use", user)));
        rows
    }
}

impl Show for VfView {
    fn text(&self) -> String {
        columns(&self.rows())
    }
}

impl Show for Done {
    fn text(&self) -> String {
        self.0.text()
    }
}

impl Show for Bound {
    fn text(&self) -> String {
        let line = |options: &[String]| vmm::shell_line(options).unwrap_or_default();
        format!(
            "{}\nQEMU:              {}\ncloud-hypervisor:  {}\n",
            self.vf.text(),
            line(&self.qemu),
            line(&self.cloud_hypervisor)
        )
    }
}

impl Show for Vec<PfView> {
    fn text(&self) -> String {
        if self.is_empty() {
            return "no NIC with SR-IOV\n".to_owned();
        }
        let title = [
            "FUNCTION",
            "DRIVER",
            "INTERFACE",
            "RDMA",
            "NUMA",
            "LINK",
            "MAC",
            "RATE",
            "SPOOF",
            "TRUST",
            "USED",
        ]
        .map(str::to_owned);
        let mut rows = vec![title];
        for pf in self {
            rows.push(pf.row());
            rows.extend(pf.vfs.iter().map(VfView::row));
        }
        let mut text = columns(&rows);
        for pf in self {
            if let Some(operation) = &pf.interrupted {
                text.push_str(&format!(
                    "{}: begun and not ended: {operation}; `vhost-rdma vf recover` ends it\n",
                    pf.function.address
                ));
            }
        }
        text
    }
}

impl Show for RecoveredView {
    fn text(&self) -> String {
        if self.0.is_empty() {
            return "nothing was interrupted\n".to_owned();
        }
        let line = |one: &Recovered| {
            let outcome = match one.outcome {
                Outcome::Completed => "completed",
                Outcome::RolledBack => "undone",
                Outcome::Obsolete => "gone with its function",
            };
            format!("{}: {}: {outcome}\n", one.pf, one.operation)
        };
        self.0.iter().map(line).collect()
    }
}
