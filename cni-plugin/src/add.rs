//! ADD: the NICs of a pod, one after the other.
//!
//! For each NIC: find out whether it can be done, have the agent write down what will be done, do
//! it. If anything fails, all that this call did is undone before the error goes out. Only then may
//! the agent forget the attempt; and not even then if it knows of steps that an earlier call made,
//! which are for DEL to undo.

use std::path::Path;

use cni_skel::{AddResult, Answer, Attachment, Code, Error, Interface, Ipam, Network};
use serde_json::{Map, Value};
use vhost_rdma_agent_api as api;
use vhost_rdma_agent_api::{AttachedNic, Kind, Nic, Personality, Step};

use crate::agent::{Agent, id};
use crate::companion::{self, Parts};
use crate::function::Functions;
use crate::host::Host;
use crate::lock::Lock;
use crate::pod::Namespaces;
use crate::settings::{self, Settings};
use crate::undo::Undone;
use crate::{device_info, ipam, undo, vf};

/// The fields of a configuration that a DEL needs.
const KEPT: [&str; 6] = ["cniVersion", "name", "type", "ipam", "args", "runtimeConfig"];
/// The longest they may be together.
pub(crate) const CONFIG_MAX: usize = 32 << 10;

/// Serves ADD.
pub(crate) fn add(
    network: &Network,
    attachment: &Attachment,
    host: &Host,
) -> Result<Answer, Error> {
    let settings = Settings::of(network, host)?;
    let device_info = settings::device_info(network, attachment, host)?;
    let config = config_for_del(network)?;
    attachment.args.only(&[])?;
    if let Some(ipam) = Ipam::of(network)? {
        ipam.installed()?;
    }
    let prev = network.config.prev_result(network.version)?;
    let Some(pod) = pod(attachment) else {
        // Not Kubernetes: nobody can have granted anything.
        return none(network, "the runtime named no pod (K8S_POD_NAMESPACE, K8S_POD_NAME)");
    };
    let netns = attachment.netns()?;
    let mut namespaces = Namespaces::open(netns)?;
    let agent = Agent::new(&settings);
    let chained = settings.device_id.is_none() && network.config.raw_prev_result.is_some();
    let uid = pod.uid.clone();
    let asked = agent.attach(api::Attach {
        pod,
        mac: settings.mac.as_ref().map(ToString::to_string),
        attachment: id(attachment),
        netns: namespaces.path.clone(),
        network: network.config.name.clone(),
        device_id: settings.device_id.clone(),
        config: Some(Value::Object(config)),
    });
    let nics = match asked {
        // The pods that have no NIC of ours, the agent's own among them, must start while it is
        // replaced.
        Err(error)
            if error.code == Code::TRY_AGAIN && chained && !host.may_have_nic(uid.as_deref()) =>
        {
            return none(network, "the kubelet gave the pod no device");
        }
        asked => asked?,
    };
    if nics.is_empty() {
        return none(network, "the pod has no NIC that is not attached yet");
    }
    let mut attempt = Attempt {
        network,
        attachment,
        settings: &settings,
        device_info,
        agent: &agent,
        made: Vec::new(),
    };
    let result = prev.unwrap_or_else(|| AddResult {
        dns: network.config.dns.clone().unwrap_or_default(),
        ..AddResult::default()
    });
    match attempt.all(&nics, &mut namespaces, result) {
        Ok(result) => Ok(result.into()),
        Err(error) => Err(attempt.take_back(error)),
    }
}

/// What the agent needs to have a DEL made that no runtime asks for: who it is, and what the IPAM
/// plugin needs. It is kept for as long as the attachment is, in the agent's memory and in its
/// ledger, so a tenant's configuration may not be as long as it likes.
fn config_for_del(network: &Network) -> Result<Map<String, Value>, Error> {
    let mut config = network.config.document().clone();
    config.retain(|key, _| KEPT.contains(&key.as_str()));
    let length = Value::Object(config.clone()).to_string().len();
    if length > CONFIG_MAX {
        let msg = format!(
            "the network configuration needs {length} bytes to be undone, more than {CONFIG_MAX}"
        );
        return Err(Error::new(Code::INVALID_CONFIG, msg)
            .details("its ipam, args or runtimeConfig are too long"));
    }
    Ok(config)
}

/// Who asks, as the runtime says: the kubelet knows pods by nothing else. `None` if it is no pod.
fn pod(attachment: &Attachment) -> Option<api::Pod> {
    let args = &attachment.args;
    let text = |value: Option<&str>| value.unwrap_or_default().to_owned();
    let pod = api::Pod {
        namespace: text(args.pod_namespace()),
        name: text(args.pod_name()),
        uid: args.pod_uid().map(str::to_owned),
    };
    (!pod.name.is_empty()).then_some(pod)
}

/// A pod without a NIC: in a chain that is most pods. Alone, somebody attached this network to a
/// pod that was granted nothing; it would start without the NIC that it was meant to have.
fn none(network: &Network, why: &str) -> Result<Answer, Error> {
    Answer::passed_through(network).ok_or_else(|| {
        Error::new(Code::INVALID_CONFIG, format!("there is nothing to attach: {why}")).details(
            "the pod must ask for a NIC in its resource limits (vhost-rdma.io/<pool>); a plugin \
             that is called for every pod must come after another one in its list",
        )
    })
}

/// One call, and what it did so far.
struct Attempt<'a> {
    network: &'a Network,
    attachment: &'a Attachment,
    settings: &'a Settings,
    /// The name of the device information file, if one is wanted.
    device_info: Option<String>,
    agent: &'a Agent,
    made: Vec<Made>,
}

/// What was written down for one NIC by this call.
struct Made {
    nic: Nic,
    steps: Vec<Step>,
    /// The IPAM plugin was asked, and did not say that it gave nothing.
    may_have_addresses: bool,
    _lock: Lock,
}

impl Attempt<'_> {
    fn all(
        &mut self,
        nics: &[Nic],
        namespaces: &mut Namespaces,
        mut result: AddResult,
    ) -> Result<AddResult, Error> {
        // In one order for every call, whatever order the interfaces have: two calls never wait for
        // each other's lock.
        let mut locks: Vec<&Nic> = nics.iter().collect();
        locks.sort_by(|a, b| a.id.cmp(&b.id));
        for nic in locks {
            let lock = Lock::take(&self.settings.host.locks(), &nic.id)?;
            self.made.push(Made {
                nic: nic.clone(),
                steps: Vec::new(),
                may_have_addresses: false,
                _lock: lock,
            });
        }
        let mut attached = Vec::with_capacity(nics.len());
        // What the plugins before gave the pod: an address is one NIC's.
        let mut pods: Vec<String> = result.ips.iter().map(|ip| ip.address.to_string()).collect();
        for nic in nics {
            let nic = self.nic_as_asked(nic)?;
            let during = |error: Error| error.during(&format!("NIC {}", nic.id));
            let addresses = self.attach(&nic, namespaces).map_err(during)?;
            let mut own: Vec<String> =
                addresses.ips.iter().map(|ip| ip.address.to_string()).collect();
            if own.is_empty() && nic.personality.kind() == Kind::Process {
                own = std::mem::take(&mut pods);
            }
            attached.push(AttachedNic {
                nic: nic.id.clone(),
                if_name: ipam::has_interface(&nic).then(|| nic.if_name.clone()),
                mac: nic.mac.clone(),
                addresses: own,
                rdma_device: rdma_device(&nic),
            });
            result.attach(interface(&nic, &namespaces.path), addresses);
            if let Personality::VhostUser { companion, .. } = &nic.personality
                && companion.bridge.is_some()
            {
                let parts = Parts::of(&nic, companion, &self.attachment.container_id);
                let outer = Interface { name: parts.outer, ..Interface::default() };
                result.interfaces.push(outer);
            }
        }
        if nics.len() > 1 && !self.network.config.runtime.ips.is_empty() {
            let msg = "runtimeConfig.ips is not supported for several NICs at once";
            return Err(Error::new(Code::UNSUPPORTED_FIELD, msg));
        }
        if let (Some(name), [nic]) = (&self.device_info, nics) {
            device_info::write(&self.settings.host, name, nic)?;
        }
        // Last: from here on the pod has its NICs.
        self.agent.attached(self.attachment, attached)?;
        Ok(result)
    }

    /// The NIC with the MAC address that the runtime asked for: a VF takes any; the agent has given
    /// it to a VM's NIC.
    fn nic_as_asked(&self, nic: &Nic) -> Result<Nic, Error> {
        let Some(mac) = &self.settings.mac else { return Ok(nic.clone()) };
        let mac = mac.to_string();
        let kind = nic.personality.kind();
        if kind == Kind::Vf || nic.mac.as_ref().is_some_and(|own| own.eq_ignore_ascii_case(&mac)) {
            return Ok(Nic { mac: Some(mac), ..nic.clone() });
        }
        let msg =
            format!("runtimeConfig.mac={mac} is not supported by NIC {} of kind {kind}", nic.id);
        let own = nic.mac.as_deref().unwrap_or("none");
        Err(Error::new(Code::UNSUPPORTED_FIELD, msg).details(format!("its own is {own}")))
    }

    /// Attaches one NIC and returns its addresses.
    fn attach(&mut self, nic: &Nic, namespaces: &mut Namespaces) -> Result<AddResult, Error> {
        let container = &self.attachment.container_id;
        let ipam_step = ipam::step(self.network, nic)?;
        match &nic.personality {
            Personality::VhostUser { companion, .. } => {
                if let Some(bridge) = &companion.bridge {
                    let parts = Parts::of(nic, companion, container);
                    let index = parts.possible(bridge, namespaces)?;
                    let mut steps = parts.steps(&namespaces.path);
                    steps.extend(ipam_step);
                    self.intend(nic, steps)?;
                    companion::make(&parts, nic, companion, container, index, namespaces)?;
                } else {
                    self.intend(nic, ipam_step.into_iter().collect())?;
                }
                self.addresses(nic)
            }
            Personality::Vf { pci, netdev, rdma_device, netns_mode } => {
                let wanted =
                    vf::Wanted { pci, netdev: netdev.as_deref(), rdma_device, mode: *netns_mode };
                let functions = Functions::of(&self.settings.host);
                let plan = vf::plan(nic, &wanted, namespaces, &functions)?;
                let mut steps = plan.steps(nic);
                steps.extend(ipam_step);
                self.intend(nic, steps)?;
                plan.carry_out(nic, container, namespaces)?;
                let addresses = self.addresses(nic)?;
                plan.configure(nic, &addresses, namespaces)?;
                Ok(addresses)
            }
            Personality::VfVfio { .. }
            | Personality::Shared { .. }
            | Personality::Process { .. } => {
                self.intend(nic, ipam_step.into_iter().collect())?;
                self.addresses(nic)
            }
        }
    }

    /// The NIC's addresses.
    fn addresses(&mut self, nic: &Nic) -> Result<AddResult, Error> {
        let added = ipam::add(self.network, nic);
        if let Some(made) = self.made.iter_mut().find(|made| made.nic.id == nic.id) {
            made.may_have_addresses = added.as_ref().err().is_none_or(|refusal| !refusal.said);
        }
        Ok(added?)
    }

    /// Has the steps written down; where there are none, nothing needs to be.
    fn intend(&mut self, nic: &Nic, steps: Vec<Step>) -> Result<(), Error> {
        if steps.is_empty() {
            return Ok(());
        }
        self.agent.intend(self.attachment, &nic.id, &steps)?;
        if let Some(made) = self.made.iter_mut().find(|made| made.nic.id == nic.id) {
            made.steps = steps;
        }
        Ok(())
    }

    /// Undoes this call. What cannot be undone stays written down, and DEL tries again.
    fn take_back(self, error: Error) -> Error {
        let mut left = Vec::new();
        let mut settled = Vec::new();
        for made in self.made.iter().rev() {
            let netns = self.attachment.netns.as_deref().unwrap_or(Path::new(""));
            let addresses = made.may_have_addresses;
            let (network, host) = (self.network, &self.settings.host);
            match undo::steps(network, host, &made.nic, &made.steps, &[netns], addresses) {
                Ok(Undone::All) => settled.push((made.nic.id.clone(), made.steps.len())),
                Ok(Undone::ButAddresses(undo)) | Err(undo) => left.push(undo.to_string()),
            }
        }
        if let Err(undo) = self.settle(&settled) {
            left.push(undo.to_string());
        }
        if left.is_empty() {
            return error;
        }
        let details = format!("{} DEL has to undo: {}", error.details, left.join("; "));
        error.details(details.trim_start())
    }

    /// Lets the agent forget NICs of which only this call's steps were written down.
    fn settle(&self, settled: &[(String, usize)]) -> Result<(), Error> {
        let records = self.agent.detach(self.attachment, None)?;
        let forget = records.iter().filter(|record| {
            settled.iter().any(|(nic, steps)| *nic == record.nic.id && *steps == record.steps.len())
        });
        let forget: Vec<String> = forget.map(|record| record.nic.id.clone()).collect();
        if forget.is_empty() {
            return Ok(());
        }
        self.agent.detached(id(self.attachment), forget)
    }
}

/// The NIC in the result. One without a netdev is in it too: where its socket or function is, and
/// which addresses it has.
fn interface(nic: &Nic, netns: &str) -> Interface {
    let (socket_path, pci_id) = match &nic.personality {
        Personality::VhostUser { container_socket, .. }
        | Personality::Process { container_socket, .. } => (Some(container_socket.clone()), None),
        Personality::Vf { pci, .. } | Personality::VfVfio { pci } => (None, Some(pci.clone())),
        Personality::Shared { pci, .. } => (None, pci.clone()),
    };
    Interface {
        name: nic.if_name.clone(),
        mac: nic.mac.clone(),
        mtu: nic.mtu,
        sandbox: Some(netns.to_owned()),
        socket_path,
        pci_id,
        ..Interface::default()
    }
}

fn rdma_device(nic: &Nic) -> Option<String> {
    match &nic.personality {
        Personality::Vf { rdma_device, .. } | Personality::Shared { rdma_device, .. } => {
            Some(rdma_device.clone())
        }
        Personality::VhostUser { .. }
        | Personality::Process { .. }
        | Personality::VfVfio { .. } => None,
    }
}
