//! Changes of functions: checked, locked, journaled.

use serde::Serialize;

use super::PciAddress;
use super::host::Host;
use super::inventory::{Inventory, VFIO_PCI, VirtualFunction};
use super::journal::{Claim, Locked, State, Store};
use super::operation::{Binding, Direction, Driver, Operation, gone};
use super::usage::User;
use crate::link::VfChange;
use crate::{Error, Result};

/// Changes the functions of a host.
#[derive(Debug)]
pub struct Manager<H> {
    host: H,
    store: Store,
    owner: Option<String>,
}

/// An operation that a crash had interrupted, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Recovered {
    /// The physical function.
    pub pf: PciAddress,
    /// What had been begun.
    pub operation: Operation,
    /// How it ended.
    pub outcome: Outcome,
}

/// How an interrupted operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was done after all.
    Completed,
    /// Everything is as before it.
    RolledBack,
    /// The functions were gone: a reboot, or the NIC was taken out.
    Obsolete,
}

impl<H: Host> Manager<H> {
    /// With its state in `dir`, usually [`STATE_DIR`](super::STATE_DIR), which is made when
    /// something is changed.
    pub fn new(host: H, dir: impl Into<std::path::PathBuf>) -> Self {
        Self { host, store: Store::new(dir), owner: None }
    }

    /// Acts for `owner`, whose claims then do not stand in the way.
    #[must_use]
    pub fn acting_for(mut self, owner: impl Into<String>) -> Self {
        self.owner = Some(owner.into());
        self
    }

    /// What there is.
    ///
    /// # Errors
    /// The host cannot be read.
    pub fn inventory(&mut self) -> Result<Inventory> {
        self.host.inventory()
    }

    /// Who uses a virtual function, claims of others included.
    ///
    /// # Errors
    /// The host or the state cannot be read.
    pub fn users(&mut self, vf: &VirtualFunction) -> Result<Vec<User>> {
        let boot = self.host.boot()?;
        let state = self.store.peek(vf.pf, &boot)?;
        let mut users = self.host.users(vf)?;
        users.extend(
            state
                .claims
                .get(&vf.address)
                .filter(|claim| Some(&claim.owner) != self.owner.as_ref())
                .map(|claim| User::Claim { owner: claim.owner.clone() }),
        );
        Ok(users)
    }

    /// Ends what a crash has interrupted, on all functions. Do this first.
    ///
    /// # Errors
    /// An operation can neither be completed nor undone; it stays in the journal.
    pub fn recover(&mut self) -> Result<Vec<Recovered>> {
        let mut list = Vec::new();
        for pf in self.store.known() {
            list.extend(self.recover_one(pf)?);
        }
        Ok(list)
    }

    /// Operations that were begun and have not ended; one that is at work now is among them.
    ///
    /// # Errors
    /// The state cannot be read.
    pub fn pending(&mut self) -> Result<Vec<(PciAddress, Operation)>> {
        let boot = self.host.boot()?;
        let mut list = Vec::new();
        for pf in self.store.known() {
            list.extend(self.store.peek(pf, &boot)?.pending.map(|operation| (pf, operation)));
        }
        Ok(list)
    }

    /// Gives a physical function this number of virtual ones; 0 removes them.
    ///
    /// The kernel knows no other way from one number to another than through none, so functions in
    /// use stand in the way of more as well as of fewer; `force` ignores that. New functions have
    /// their default settings.
    ///
    /// # Errors
    /// One is in use, the NIC cannot have so many, the driver refuses. There are as many as before
    /// then.
    pub fn create(&mut self, pf: &str, count: u32, force: bool) -> Result<()> {
        let pf = self.host.inventory()?.pf(pf)?.address;
        self.change(pf, |manager, inventory, state| {
            let function = inventory.pf_at(pf).ok_or_else(|| gone(pf))?;
            if count > function.total_vfs {
                return Err(Error::Invalid(format!(
                    "{pf} can have {} virtual functions, not {count}",
                    function.total_vfs
                )));
            }
            if function.vf_count == count {
                return Ok(None);
            }
            for vf in &function.vfs {
                manager.refuse_if_used(vf, state, force)?;
            }
            Ok(Some(Operation::Resize { before: function.vf_count, after: count }))
        })
    }

    /// Changes what the physical function holds for a virtual one. May be done while it is in use.
    ///
    /// # Errors
    /// The driver refuses a field; the others are as before then.
    pub fn set(&mut self, vf: &PciAddress, change: &VfChange) -> Result<()> {
        let pf = self.pf_of(*vf)?;
        self.change(pf, |_, inventory, _| {
            let function = inventory.vf_at(*vf).ok_or_else(|| gone(*vf))?;
            let settings = function.settings.as_ref().ok_or_else(|| {
                Error::NotFound(format!(
                    "the physical function {pf} has no network interface in this namespace, and \
                     its VFs are set by way of it"
                ))
            })?;
            let before = change.inverse(settings);
            Ok((before != *change).then(|| Operation::Set {
                vf: function.index,
                before,
                after: change.clone(),
            }))
        })
    }

    /// Gives a virtual function to [`VFIO_PCI`], for a VM.
    ///
    /// # Errors
    /// It is in use (unless `force`), the driver is not loaded, there is no IOMMU.
    pub fn bind(&mut self, vf: &PciAddress, force: bool) -> Result<()> {
        let after = Binding {
            driver: Driver::Named(VFIO_PCI.to_owned()),
            driver_override: Some(VFIO_PCI.to_owned()),
        };
        let pf = self.pf_of(*vf)?;
        self.change(pf, |manager, inventory, state| {
            if let Some(obstacle) = manager.host.obstacle(*vf, VFIO_PCI) {
                return Err(Error::Conflict(obstacle));
            }
            manager.rebind(inventory.vf_at(*vf).ok_or_else(|| gone(*vf))?, after, state, force)
        })
    }

    /// Gives a virtual function back to the driver that it had before [`bind`](Self::bind), or to
    /// its own if that is not known.
    ///
    /// # Errors
    /// It is in use (unless `force`).
    pub fn unbind(&mut self, vf: &PciAddress, force: bool) -> Result<()> {
        let pf = self.pf_of(*vf)?;
        self.change(pf, |manager, inventory, state| {
            let function = inventory.vf_at(*vf).ok_or_else(|| gone(*vf))?;
            let known = state.origins.get(vf).cloned();
            let after = known.unwrap_or(Binding { driver: Driver::Any, driver_override: None });
            manager.rebind(function, after, state, force)
        })
    }

    /// Reserves a virtual function for an owner: others may not bind or remove it.
    ///
    /// # Errors
    /// It is reserved by somebody else.
    pub fn claim(&mut self, vf: &PciAddress, claim: Claim) -> Result<()> {
        let pf = self.pf_of(*vf)?;
        let boot = self.host.boot()?;
        let locked = self.store.lock(pf, boot)?;
        let mut state = locked.load()?;
        match state.claims.get(vf) {
            Some(other) if other.owner != claim.owner => {
                Err(Error::Conflict(format!("{vf} is reserved by {}", other.owner)))
            }
            _ => {
                state.claims.insert(*vf, claim);
                locked.save(&state)
            }
        }
    }

    /// Ends a reservation; says whether there was one of this owner.
    ///
    /// # Errors
    /// The state cannot be written.
    pub fn release(&mut self, vf: &PciAddress, owner: &str) -> Result<bool> {
        let boot = self.host.boot()?;
        let Some(pf) = self.store.known().into_iter().find(|pf| {
            self.store.peek(*pf, &boot).is_ok_and(|state| state.claims.contains_key(vf))
        }) else {
            return Ok(false);
        };
        let locked = self.store.lock(pf, boot)?;
        let mut state = locked.load()?;
        if state.claims.get(vf).is_none_or(|claim| claim.owner != owner) {
            return Ok(false);
        }
        state.claims.remove(vf);
        locked.save(&state).map(|()| true)
    }

    fn pf_of(&mut self, vf: PciAddress) -> Result<PciAddress> {
        self.host.inventory()?.vf_at(vf).map(|function| function.pf).ok_or_else(|| gone(vf))
    }

    fn rebind(
        &mut self,
        vf: &VirtualFunction,
        after: Binding,
        state: &State,
        force: bool,
    ) -> Result<Option<Operation>> {
        let before = Binding {
            driver: vf.driver.as_deref().into(),
            driver_override: vf.driver_override.clone(),
        };
        let there = before == after
            || (after.driver == Driver::Any
                && vf.driver_override.is_none()
                && !matches!(vf.driver.as_deref(), None | Some(VFIO_PCI)));
        if there {
            return Ok(None);
        }
        self.refuse_if_used(vf, state, force)?;
        Ok(Some(Operation::Bind { function: vf.address, before, after }))
    }

    fn refuse_if_used(&mut self, vf: &VirtualFunction, state: &State, force: bool) -> Result<()> {
        if let Some(claim) =
            state.claims.get(&vf.address).filter(|claim| Some(&claim.owner) != self.owner.as_ref())
        {
            // Whoever reserved it counts on it: force is for what only looks used.
            return Err(Error::Conflict(format!(
                "virtual function {} is reserved by {}",
                vf.address, claim.owner
            )));
        }
        let users = self.host.users(vf)?;
        match users.first() {
            Some(user) if !force => {
                Err(Error::Conflict(format!("virtual function {} is in use: {user}", vf.address)))
            }
            _ => Ok(()),
        }
    }

    /// Plans an operation under the lock, writes it down, does it, writes that it is done; undoes
    /// it if it fails.
    fn change(
        &mut self,
        pf: PciAddress,
        plan: impl FnOnce(&mut Self, &Inventory, &State) -> Result<Option<Operation>>,
    ) -> Result<()> {
        self.recover_one(pf)?;
        let boot = self.host.boot()?;
        // The lock must outlive borrows of `self`: the store is only a path.
        let store = self.store.clone();
        let locked = store.lock(pf, boot)?;
        let mut state = locked.load()?;
        if state.pending.is_some() {
            // Between our recovery and our lock another process has begun something and died.
            finish(&mut self.host, &locked, pf, &mut state)?;
        }
        let inventory = self.host.inventory()?;
        let Some(operation) = plan(self, &inventory, &state)? else { return Ok(()) };
        state.pending = Some(operation.clone());
        locked.save(&state)?;
        match operation.drive(&mut self.host, pf, Direction::Forward) {
            Ok(()) => {
                done(&mut state, &operation);
                locked.save(&state)
            }
            Err(error) => match operation.drive(&mut self.host, pf, Direction::Back) {
                Ok(()) => {
                    state.pending = None;
                    locked.save(&state)?;
                    Err(error)
                }
                Err(second) => Err(Error::Conflict(format!(
                    "{error}; nor can it be undone ({second}): it stays in the journal for `vf \
                     recover`"
                ))),
            },
        }
    }

    fn recover_one(&mut self, pf: PciAddress) -> Result<Option<Recovered>> {
        let boot = self.host.boot()?;
        if self.store.peek(pf, &boot)?.pending.is_none() && !self.store.is_stale(pf, &boot)? {
            return Ok(None);
        }
        let store = self.store.clone();
        let locked = store.lock(pf, boot)?;
        if let Some(operation) = locked.obsolete()? {
            locked.save(&State::default())?;
            return Ok(Some(Recovered { pf, operation, outcome: Outcome::Obsolete }));
        }
        let mut state = locked.load()?;
        finish(&mut self.host, &locked, pf, &mut state)
    }
}

/// Completes what is pending, or undoes it.
fn finish(
    host: &mut dyn Host,
    locked: &Locked<'_>,
    pf: PciAddress,
    state: &mut State,
) -> Result<Option<Recovered>> {
    let Some(operation) = state.pending.clone() else { return Ok(None) };
    let inventory = host.inventory()?;
    let there = match &operation {
        Operation::Bind { function, .. } => inventory.vf_at(*function).is_some(),
        Operation::Set { vf, .. } => {
            inventory.pf_at(pf).is_some_and(|pf| pf.vfs.iter().any(|one| one.index == *vf))
        }
        Operation::Resize { .. } => inventory.pf_at(pf).is_some(),
    };
    let outcome = if !there {
        state.pending = None;
        Outcome::Obsolete
    } else if let Err(error) = operation.drive(host, pf, Direction::Forward) {
        operation.drive(host, pf, Direction::Back).map_err(|second| {
            Error::Conflict(format!(
                "cannot {operation} on {pf}, which was interrupted ({error}), nor undo it \
                 ({second})"
            ))
        })?;
        state.pending = None;
        Outcome::RolledBack
    } else {
        done(state, &operation);
        Outcome::Completed
    };
    locked.save(state)?;
    Ok(Some(Recovered { pf, operation, outcome }))
}

/// What is known once an operation is done.
fn done(state: &mut State, operation: &Operation) {
    state.pending = None;
    match operation {
        // All functions are new.
        Operation::Resize { .. } => {
            state.origins.clear();
            state.claims.clear();
        }
        Operation::Set { .. } => {}
        Operation::Bind { function, before, after } => {
            if after.driver == Driver::Named(VFIO_PCI.to_owned()) {
                state.origins.entry(*function).or_insert_with(|| before.clone());
            } else {
                state.origins.remove(function);
            }
        }
    }
}
