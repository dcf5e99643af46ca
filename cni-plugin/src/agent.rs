//! The node agent, as the plugin asks it.

use std::path::PathBuf;
use std::time::Duration;

use cni_skel::{Attachment, Code, Error, ValidAttachment};
use vhost_rdma_agent_api as api;
use vhost_rdma_agent_api::{CallError, Checked, FaultKind, Nic, Record, Reply, Request, Step};

use crate::answer;

/// The agent syncs its journal and may ask kubelet and daemon before it answers; a runtime waits
/// some minutes for a plugin.
const PATIENCE: Duration = Duration::from_secs(30);

/// The agent behind a socket. Every question is a connection of its own.
#[derive(Debug, Clone)]
pub(crate) struct Agent {
    socket: PathBuf,
}

impl Agent {
    pub(crate) fn new(settings: &crate::settings::Settings) -> Self {
        Self { socket: settings.host.agent.clone() }
    }

    fn ask(&self, request: &Request) -> Result<Reply, Error> {
        api::call(&self.socket, request, PATIENCE).map_err(|error| said(&error))
    }

    /// The NICs to attach.
    pub(crate) fn attach(&self, attach: api::Attach) -> Result<Vec<Nic>, Error> {
        let (device, ifname) = (attach.device_id.clone(), attach.attachment.if_name.clone());
        match self.ask(&Request::Attach(attach))? {
            Reply::Nics(nics) => {
                answer::nics(&nics, device.as_deref(), &ifname)?;
                Ok(nics)
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Has it written down what is about to be done.
    pub(crate) fn intend(
        &self,
        attachment: &Attachment,
        nic: &str,
        steps: &[Step],
    ) -> Result<(), Error> {
        let (attachment, nic) = (id(attachment), nic.to_owned());
        self.told(&Request::Intend(api::Intend { attachment, nic, steps: steps.to_vec() }))
    }

    /// Tells it what came of an ADD.
    pub(crate) fn attached(
        &self,
        attachment: &Attachment,
        nics: Vec<api::AttachedNic>,
    ) -> Result<(), Error> {
        self.told(&Request::Attached(api::Attached { attachment: id(attachment), nics }))
    }

    /// What there is to undo for a DEL.
    pub(crate) fn detach(
        &self,
        attachment: &Attachment,
        device_id: Option<&str>,
    ) -> Result<Vec<Record>, Error> {
        let records = self.records(&Request::Detach(api::Detach {
            container_id: attachment.container_id.clone(),
            if_name: Some(attachment.ifname.clone()),
            device_id: device_id.map(str::to_owned),
        }))?;
        answer::records(&records, Some(&attachment.container_id))?;
        Ok(records)
    }

    /// What there is to undo of one attachment of a NIC by now; nothing if that was done.
    pub(crate) fn again(&self, record: &Record) -> Result<Vec<Record>, Error> {
        let container = &record.attachment.container_id;
        let mut records = self.records(&Request::Detach(api::Detach {
            container_id: container.clone(),
            if_name: Some(record.attachment.if_name.clone()),
            device_id: Some(record.nic.id.clone()),
        }))?;
        answer::records(&records, Some(container))?;
        records.retain(|now| now.attachment == record.attachment && now.nic.id == record.nic.id);
        Ok(records)
    }

    /// Tells it that NICs of an attachment are put back.
    pub(crate) fn detached(
        &self,
        attachment: api::Attachment,
        nics: Vec<String>,
    ) -> Result<(), Error> {
        self.told(&Request::Detached(api::Detached { attachment, nics }))
    }

    /// Tells it that NICs of an attachment are put back, but for addresses that their IPAM plugin
    /// does not take back, and why.
    ///
    /// # Errors
    /// That one, if the agent is of a release that cannot remember such a thing.
    pub(crate) fn owing(
        &self,
        attachment: api::Attachment,
        nics: Vec<String>,
        why: Error,
    ) -> Result<(), Error> {
        let request = Request::Owing(api::Detached { attachment, nics });
        match api::call(&self.socket, &request, PATIENCE) {
            Ok(Reply::Done) => Ok(()),
            Ok(other) => Err(unexpected(&other)),
            Err(CallError::Fault(fault)) if fault.kind == FaultKind::BadRequest => Err(why),
            Err(error) => Err(said(&error)),
        }
    }

    /// What is written down for an attachment, and the live state of its NICs. The agent refuses
    /// as not found one of which it knows nothing: that is a pod without a NIC, as most of a
    /// chain's are.
    pub(crate) fn check(&self, attachment: api::Attachment) -> Result<Vec<Checked>, Error> {
        match api::call(&self.socket, &Request::Check(attachment), PATIENCE) {
            Ok(Reply::Checked(checked)) => Ok(checked),
            Ok(other) => Err(unexpected(&other)),
            Err(CallError::Fault(fault)) if fault.kind == FaultKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(said(&error)),
        }
    }

    /// What belongs to no valid attachment.
    pub(crate) fn gc(
        &self,
        network: &str,
        valid: &[ValidAttachment],
    ) -> Result<Vec<Record>, Error> {
        let valid = valid.iter().map(valid_id).collect();
        let records = self.records(&Request::Gc(api::Gc { network: network.to_owned(), valid }))?;
        answer::records(&records, None)?;
        Ok(records)
    }

    /// Whether it can attach NICs.
    ///
    /// # Errors
    /// Code 50 if not; 51 if NICs that pods have do not work either.
    pub(crate) fn ready(&self) -> Result<(), Error> {
        let status = match self.ask(&Request::Status) {
            Ok(Reply::Status(status)) => status,
            Ok(other) => return Err(unexpected(&other)),
            Err(error) => return Err(Error { code: Code::NOT_AVAILABLE, ..error }),
        };
        if status.ready {
            return Ok(());
        }
        let broken =
            |device: &&api::DeviceStatus| !device.healthy && !device.attachments.is_empty();
        let broken: Vec<&str> =
            status.devices.iter().filter(broken).map(|device| device.id.as_str()).collect();
        let problems = status.problems.join("; ");
        if broken.is_empty() {
            return Err(
                Error::new(Code::NOT_AVAILABLE, "the node agent is not ready").details(problems)
            );
        }
        let msg = format!(
            "the node agent is not ready, and NICs of pods do not work: {}",
            broken.join(", ")
        );
        Err(Error::new(Code::NOT_AVAILABLE_LIMITED, msg).details(problems))
    }

    fn told(&self, request: &Request) -> Result<(), Error> {
        match self.ask(request)? {
            Reply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    fn records(&self, request: &Request) -> Result<Vec<Record>, Error> {
        match self.ask(request)? {
            Reply::Records(records) => Ok(records),
            other => Err(unexpected(&other)),
        }
    }
}

/// The attachment in the agent's words.
pub(crate) fn id(attachment: &Attachment) -> api::Attachment {
    api::Attachment {
        container_id: attachment.container_id.clone(),
        if_name: attachment.ifname.clone(),
    }
}

/// Likewise for one of GC's list.
pub(crate) fn valid_id(valid: &ValidAttachment) -> api::Attachment {
    api::Attachment { container_id: valid.container_id.clone(), if_name: valid.ifname.clone() }
}

fn said(error: &CallError) -> Error {
    Error::new(Code(error.cni_code()), error.to_string())
}

fn unexpected(reply: &Reply) -> Error {
    let what = match reply {
        Reply::Done => "done",
        Reply::Status(_) => "status",
        Reply::Nics(_) => "nics",
        Reply::Records(_) => "records",
        Reply::Checked(_) => "checked",
        Reply::Fault(_) => "fault",
    };
    let msg = format!("the node agent answered something else than was asked: {what}");
    Error::new(Code::INTERNAL, msg).details("install plugin and agent of the same release")
}
