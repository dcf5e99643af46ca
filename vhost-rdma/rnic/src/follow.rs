//! What is many, in steps: commands that have begun, and keys over guest memory that is gone.
//!
//! `nic::dispatch` does the same for what is every backing's, and says why. Here the end of some is
//! a command to the RNIC besides, or a system call at least, so each counts as much as
//! [`HOST_CALL`].

use easy_ext::ext;
use vhost_rdma_engine::nic::Status;
use vhost_rdma_engine::nic::budget::{Budget, cost};
use vhost_rdma_engine::nic::work;
use vhost_rdma_memory::AddressSpace;

use super::drain::Drains as _;
use super::gsi::GsiVerbs as _;
use super::mr::RegionVerbs as _;
use super::mw::WindowVerbs as _;
use super::nic::{Nic, Rnic};
use super::region::Mr;
use super::verbs::HostMr;
use super::work::{HOST_CALL, Keys, Work};

#[ext(Follow)]
pub(super) impl Nic {
    fn walk_keys(&self) -> Keys {
        Keys {
            gsi: self.backing.services.lost_rings(&self.space),
            lost: self.backing.mr_keys.all().walk(),
            windows: self.backing.windows.walk(),
            keys: self.backing.mr_keys.all().walk(),
        }
    }

    /// Looks at keys after a change of memory: those of regions that are gone open nothing when
    /// this is over. True: that was all.
    fn follow_keys(
        &mut self,
        change: &mut Keys,
        space: &AddressSpace,
        budget: &mut Budget,
    ) -> bool {
        if std::mem::take(&mut change.gsi) {
            self.gsi_fatal();
            self.backing.services.drop_rings();
        }
        while let Some(key) = change.lost.next(self.backing.mr_keys.all()) {
            let mappings = self.backing.mrs.get_mut(&key).map_or(0, |mr| mr.follow(space));
            self.meter.charge_each(cost::VISIT, 1 + mappings);
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        while let Some(number) = self.backing.windows.next(&mut change.windows) {
            self.meter.charge(cost::VISIT);
            if self.backing.windows.shows_lost(number, &self.backing.mrs) {
                self.meter.charge(HOST_CALL);
                self.free_window(number);
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        while let Some(key) = change.keys.next(self.backing.mr_keys.all()) {
            self.meter.charge(cost::VISIT);
            let lost: Option<HostMr> = self.backing.mrs.get_mut(&key).and_then(Mr::take_lost);
            if let Some(host) = lost {
                self.meter.charge(cost::OBJECT);
                self.let_go(host);
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        true
    }

    /// What has begun ends without an answer: its queue was stopped. A QP that the hardware has in
    /// RESET begins anew all the same.
    fn abandon(&mut self, work: &Work) {
        match work {
            Work::BeginAnew(qpn, _) => drop(self.begin_anew(*qpn)),
            Work::EndQp(_) | Work::Drain(_) | Work::ForgetChanges(..) => {}
        }
    }

    /// Goes on with a command that has begun; what is left of it, or what comes next.
    fn carry_on(
        &mut self,
        mut work: Work,
        budget: &mut Budget,
    ) -> Result<Option<work::Work<Rnic>>, Status> {
        let done = match &mut work {
            Work::EndQp(qpn) => self.end_windows_of(*qpn, budget),
            Work::Drain(drain) | Work::BeginAnew(_, drain) => self.drain_host(drain, budget),
            Work::ForgetChanges(life, walk) => self.forget_changes(*life, walk, budget),
        };
        let next = match work {
            work if !done => Some(work),
            Work::Drain(_) | Work::ForgetChanges(..) => None,
            Work::EndQp(qpn) => {
                self.remove_qp(qpn);
                // Before the number can come back: completions of a shared queue carry only that.
                Some(Work::Drain(self.drain()))
            }
            Work::BeginAnew(qpn, _) => {
                let walk = self.backing.windows.walk_of(qpn);
                let serial = self.begin_anew(qpn).ok_or(Status::NOENT)?;
                Some(Work::ForgetChanges((qpn, serial), walk))
            }
        };
        Ok(next.map(work::Work::Own))
    }
}
