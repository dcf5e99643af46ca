//! `vf`: virtual functions of the host's NICs, without a daemon.
//!
//! The work is done in the crate `rdma-netlink`, as it is for the Kubernetes node agent, and both
//! keep one journal: what one begins and dies in, the other ends.

mod args;
mod view;

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};

pub(super) use args::VfArgs;
use args::{Confirm, VfCommand, VmmArgs};
use rdma_netlink::link::VfChange;
use rdma_netlink::sriov::{Inventory, Manager, System, VFIO_PCI, VirtualFunction};
use vhost_rdma_vmm as vmm;
use view::{Bound, Done, PfView, RecoveredView, VfView};

use super::Failure;
use super::view::{options, show};

/// Runs one command.
pub(super) fn run(args: VfArgs, json: bool) -> Result<(), Failure> {
    let mut vfs = Vfs { manager: Manager::new(System::default(), args.state_dir), json };
    match args.command {
        VfCommand::List { pf } => vfs.list(pf.as_deref()),
        VfCommand::Show { vf } => {
            let found = vfs.find(&vf)?;
            let view = vfs.view(&found)?;
            show(json, &view)
        }
        VfCommand::Create { pf, count, confirm } => vfs.create(&pf, count, confirm),
        VfCommand::Set { vf, change } => vfs.set(&vf, &change.into()),
        VfCommand::Bind { vf, confirm } => vfs.bind(&vf, confirm),
        VfCommand::Unbind { vf, confirm } => vfs.unbind(&vf, confirm),
        VfCommand::QemuArgs(args) => vfs.passthrough(&args, vmm::qemu_passthrough),
        VfCommand::CloudHypervisorArgs(args) => {
            vfs.passthrough(&args, vmm::cloud_hypervisor_passthrough)
        }
        VfCommand::Recover => {
            let recovered = vfs.manager.recover()?;
            show(json, &RecoveredView(recovered))
        }
    }
}

struct Vfs {
    manager: Manager<System>,
    json: bool,
}

impl Vfs {
    fn list(&mut self, pf: Option<&str>) -> Result<(), Failure> {
        let mut inventory = self.manager.inventory()?;
        if let Some(pf) = pf {
            inventory = Inventory { functions: vec![inventory.pf(pf)?.clone()] };
        }
        let pending = self.manager.pending()?;
        let mut list = Vec::new();
        for pf in inventory.functions {
            let interrupted = pending.iter().find(|(address, _)| *address == pf.address);
            let mut vfs = Vec::new();
            for vf in &pf.vfs {
                vfs.push(self.view(vf)?);
            }
            list.push(PfView::new(pf, vfs, interrupted.map(|(_, operation)| operation.clone())));
        }
        show(self.json, &list)
    }

    fn find(&mut self, name: &str) -> Result<VirtualFunction, Failure> {
        Ok(self.manager.inventory()?.vf(name)?.clone())
    }

    fn view(&mut self, vf: &VirtualFunction) -> Result<VfView, Failure> {
        Ok(VfView { users: self.manager.users(vf)?, vf: vf.clone() })
    }

    fn create(&mut self, name: &str, count: u32, confirm: Confirm) -> Result<(), Failure> {
        let inventory = self.manager.inventory()?;
        let pf = inventory.pf(name)?;
        if pf.vf_count > 0 && pf.vf_count != count && count <= pf.total_vfs {
            confirm.ask(&format!(
                "This removes the {} virtual functions of {name}, with their settings.",
                pf.vf_count
            ))?;
        }
        self.manager.create(name, count, confirm.force)?;
        self.list(Some(name))
    }

    fn set(&mut self, name: &str, change: &VfChange) -> Result<(), Failure> {
        if change.is_empty() {
            return Err(Failure::Usage(
                "nothing to change: give at least one option, such as --max-tx-rate; `vhost-rdma \
                 vf set --help` shows all"
                    .to_owned(),
            ));
        }
        let vf = self.find(name)?;
        self.manager.set(&vf.address, change)?;
        self.show_changed(&vf)
    }

    fn bind(&mut self, name: &str, confirm: Confirm) -> Result<(), Failure> {
        let vf = self.find(name)?;
        self.ask_if_used(&vf, confirm)?;
        self.manager.bind(&vf.address, confirm.force)?;
        let vf = self.find(&vf.address.to_string())?;
        let function = vf.address.to_string();
        let bound = Bound {
            qemu: vmm::qemu_passthrough(&function, 0),
            cloud_hypervisor: vmm::cloud_hypervisor_passthrough(&function, 0),
            vf: self.view(&vf)?,
        };
        show(self.json, &bound)
    }

    fn unbind(&mut self, name: &str, confirm: Confirm) -> Result<(), Failure> {
        let vf = self.find(name)?;
        self.ask_if_used(&vf, confirm)?;
        self.manager.unbind(&vf.address, confirm.force)?;
        self.show_changed(&vf)
    }

    /// Without `--force` a function in use is refused anyway.
    fn ask_if_used(&mut self, vf: &VirtualFunction, confirm: Confirm) -> Result<(), Failure> {
        match self.manager.users(vf)?.first() {
            Some(user) if confirm.force => {
                confirm.ask(&format!("{} is in use: {user}.", vf.address))
            }
            _ => Ok(()),
        }
    }

    fn show_changed(&mut self, vf: &VirtualFunction) -> Result<(), Failure> {
        let vf = self.find(&vf.address.to_string())?;
        let view = self.view(&vf)?;
        show(self.json, &Done(view))
    }

    fn passthrough(
        &mut self,
        args: &VmmArgs,
        print: fn(&str, u32) -> Vec<String>,
    ) -> Result<(), Failure> {
        let vf = self.find(&args.vf)?;
        if vf.driver.as_deref() != Some(VFIO_PCI) {
            eprintln!(
                "vhost-rdma: {} is not bound to {VFIO_PCI} yet: run `vhost-rdma vf bind {}` before \
                 the VM starts",
                vf.address, args.vf
            );
        }
        options(self.json, &print(&vf.address.to_string(), args.index))
    }
}

impl Confirm {
    /// Goes on only with consent: `--yes`, or an answer from a person.
    fn ask(self, what: &str) -> Result<(), Failure> {
        if self.yes {
            return Ok(());
        }
        if !io::stdin().is_terminal() {
            return Err(Failure::Usage(format!("{what} Give --yes to do it.")));
        }
        let mut answer = String::new();
        eprint!("{what} Go on? [y/N] ");
        let read = io::stderr().flush().and_then(|()| io::stdin().lock().read_line(&mut answer));
        read.map_err(|source| Failure::Io { action: "read an answer".to_owned(), source })?;
        match answer.trim() {
            "y" | "Y" | "yes" => Ok(()),
            _ => Err(Failure::Usage("nothing was done".to_owned())),
        }
    }
}
