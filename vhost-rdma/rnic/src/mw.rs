//! Memory windows (IBTA 10.6.7): a host window each, bound and unbound by work requests of the
//! guest.
//!
//! What a bind may show, and what a window shows while changes are under way, is in `windows`.
//!
//! A window whose state cannot be known any more (the QP of its bind was destroyed or reset before
//! the answer), or that would hold up the end of a QP or of memory that is gone, is taken from the
//! hardware at once: its keys open nothing, and its number waits for MW_DEALLOC.

use easy_ext::ext;
use vhost_rdma_engine::nic::budget::{Budget, cost};
use vhost_rdma_engine::nic::limits::WINDOWS_PER_MR;
use vhost_rdma_engine::nic::quota::Kind;
use vhost_rdma_engine::nic::roster::Walk;
use vhost_rdma_engine::nic::{Reply, Status};
use virtio_rdma_abi::mw_type;

use super::nic::Nic;
use super::refusal::Control as _;
use super::verbs::HostMw;
use super::windows::{Window, Windows};
use super::work::HOST_CALL;

/// Windows that may be made in vain: a number that a dead one still has is no good for a new one.
const TRIES: usize = 8;

#[ext(WindowVerbs)]
pub(super) impl Nic {
    fn allocate_window(&mut self, ctx: u32, pdn: u32, kind: u32) -> Result<Reply, Status> {
        let pd = self.host_pd(ctx, pdn)?;
        let offered = match kind {
            mw_type::TYPE1 => self.backing.host.limits().windows_1,
            mw_type::TYPE2 => self.backing.host.limits().windows_2,
            _ => return Err(self.no_such_window()),
        };
        if !offered {
            return Err(Status::NOTSUPP);
        }
        if self.backing.windows.len() >= self.max_windows() as usize {
            return Err(Status::NOMEM);
        }
        self.kept.place(Kind::Window, self.backing.windows.len())?;
        let mut vain = Vec::new();
        let mut found = Err(Status::NOMEM);
        for _ in 0..TRIES {
            match self.backing.host.alloc_mw(pd, kind) {
                Ok((host, key)) if self.backing.windows.contains(Windows::number(key)) => {
                    vain.push(host);
                }
                Ok(made) => {
                    found = Ok(made);
                    break;
                }
                Err(error) => {
                    found = Err(self.refused(error));
                    break;
                }
            }
        }
        self.free_windows(vain);
        let (host, key) = found?;
        let window = Window::new((ctx, pdn), kind, (host, key));
        self.backing.windows.insert(Windows::number(key), window);
        self.join_pd(pdn);
        Ok(Reply::Object(key))
    }

    /// A device without windows does not know their types either.
    fn no_such_window(&self) -> Status {
        let limits = self.backing.host.limits();
        if limits.windows_1 || limits.windows_2 { Status::INVAL } else { Status::NOTSUPP }
    }

    fn max_windows(&self) -> u32 {
        let ours = self.settings.limits.max_mrs.saturating_mul(WINDOWS_PER_MR);
        ours.min(self.backing.host.limits().max_mw)
    }

    fn deallocate_window(&mut self, ctx: u32, key: u32) -> Result<Reply, Status> {
        let number = Windows::number(key);
        self.backing.windows.context(number).filter(|own| *own == ctx).ok_or(Status::NOENT)?;
        self.remove_window(number);
        Ok(Reply::Done)
    }

    fn remove_window(&mut self, number: u32) {
        if let Some(window) = self.backing.windows.remove(number) {
            self.leave_pd(window.pdn);
            self.free_windows(window.host.into_iter().collect());
        }
    }

    fn free_windows(&mut self, windows: Vec<HostMw>) {
        windows
            .into_iter()
            .for_each(|window| self.forgo(|nic| nic.backing.host.dealloc_mw(window)));
    }

    /// Takes a window from the hardware.
    fn free_window(&mut self, number: u32) {
        if let Some(host) = self.backing.windows.kill(number) {
            self.forgo(|nic| nic.backing.host.dealloc_mw(host));
        }
    }

    /// A QP is about to go, and its windows with it: rdma_rxe frees no QP that has some (rxe_mw.c,
    /// rxe_do_bind_mw: each holds a reference). True: that was all.
    fn end_windows_of(&mut self, qpn: u32, budget: &mut Budget) -> bool {
        // The last of those that are left, each time: the QP may bind others meanwhile.
        while let Some(number) =
            self.backing.windows.next_of(qpn, &mut self.backing.windows.walk_of(qpn))
        {
            self.meter.charge(HOST_CALL);
            self.free_window(number);
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        true
    }

    /// A life of a QP is over: what its work requests did to windows stays unknown. True: that was
    /// the end of the walk.
    fn forget_changes(
        &mut self,
        (qpn, serial): (u32, u32),
        walk: &mut Walk,
        budget: &mut Budget,
    ) -> bool {
        while let Some(number) = self.backing.windows.next_of(qpn, walk) {
            self.meter.charge(cost::VISIT);
            if self.backing.windows.waits_for(number, serial) {
                self.meter.charge(HOST_CALL);
                self.free_window(number);
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        true
    }
}
