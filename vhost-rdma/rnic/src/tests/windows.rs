//! Memory windows over null host verbs: what the host is asked for, what a failure leaves, and who
//! holds what.

use std::sync::Arc;

use vhost_rdma_memory::{AddressSpace, Ring};
use virtio_rdma_abi::{access, mw_type};

use super::*;

const READ: u32 = access::REMOTE_READ;
const WRITE: u32 = access::REMOTE_WRITE;
const ALL: u32 = access::LOCAL_WRITE | READ | WRITE | access::REMOTE_ATOMIC;
const BINDABLE: u32 = ALL | access::MW_BIND;

/// BIND_MW.
#[derive(Clone, Copy)]
struct Bind {
    present: u32,
    new: u32,
    region: u32,
    range: (u64, u64),
    rights: u32,
}

impl Bind {
    fn wqe(self, wr_id: u64) -> abi::SqWqe {
        let mut wqe = wqe(opcode::BIND_MW, SIGNALED, wr_id);
        wqe.imm = U32::new(self.present);
        wqe.rkey = U32::new(self.new);
        wqe.remote_addr = U64::new(self.range.0);
        wqe.arg0 = U64::new(self.range.1);
        wqe.arg1 = U64::new(self.region.into());
        wqe.aux = U32::new(self.rights);
        wqe
    }
}

fn invalidate(key: u32, wr_id: u64) -> abi::SqWqe {
    abi::SqWqe { imm: U32::new(key), ..wqe(opcode::LOCAL_INV, SIGNALED, wr_id) }
}

impl Bench {
    fn window(&mut self, guest: &Guest, kind: u32) -> u32 {
        match self.world.ok(guest, guest.ctx, Command::MwAlloc { pdn: guest.pd, kind }) {
            Reply::Object(key) => key,
            other => panic!("{other:?}"),
        }
    }

    /// A region of two pages in a domain of the guest's.
    fn region(&mut self, guest: &mut Guest, pdn: u32, rights: u32) -> (u64, u32) {
        let at = guest.alloc(8192);
        let list = PageList { addr: at, npages: 2, page_shift: 12, ..PageList::default() };
        let map = Arc::new(list.resolve(&guest.space, 8192).unwrap());
        let command = Command::MrReg { pdn, access: rights, iova: at, map };
        match self.world.ok(guest, guest.ctx, command) {
            Reply::Mr(made) => (at, made.lkey.get()),
            other => panic!("{other:?}"),
        }
    }

    /// Posts, and what became of it.
    fn run(&mut self, guest: &Guest, qp: &mut Qp, wqes: &[abi::SqWqe]) -> Vec<(u64, u8)> {
        wqes.iter().for_each(|wqe| guest.post_send(qp, *wqe, &[]));
        self.world.settle();
        guest.statuses(&mut qp.cq)
    }

    fn dereg(&mut self, guest: &Guest, key: u32) -> Result<(), Status> {
        self.world.execute(guest, guest.ctx, Command::MrDereg(key)).map(drop)
    }

    /// A guest with a connected QP, and a window of a kind with a bind to a region of the guest's
    /// own.
    fn scene(&mut self, kind: u32) -> (Guest, Faults, (Qp, Qp), Bind) {
        let (mut guest, faults) = self.guest(1, 1);
        let pair = self.pair(&mut guest);
        let pdn = guest.pd;
        let (at, region) = self.region(&mut guest, pdn, BINDABLE);
        let present = self.window(&guest, kind);
        let bind = Bind { present, new: present ^ 1, region, range: (at, 64), rights: READ };
        (guest, faults, pair, bind)
    }
}

#[test]
fn a_bound_region_stays_until_its_window_lets_go() {
    let mut bench = Bench::new();
    let (guest, faults, (mut a, _), bind) = bench.scene(mw_type::TYPE1);
    assert_eq!(bench.run(&guest, &mut a, &[bind.wqe(1)]), [(1, 0)]);
    assert_eq!(bench.dereg(&guest, bind.region), Err(Status::BUSY));
    let pd = Command::PdDestroy(guest.pd);
    assert_eq!(bench.world.execute(&guest, guest.ctx, pd).unwrap_err(), Status::BUSY);
    // The old key is dead; the new one binds again, and unbinds.
    let again = Bind { present: bind.new, new: bind.new ^ 2, ..bind };
    let unbind = Bind { present: again.new, new: again.new, range: (0, 0), region: 0, ..bind };
    assert_eq!(bench.run(&guest, &mut a, &[again.wqe(2), unbind.wqe(3)]), [(2, 0), (3, 0)]);
    assert_eq!(bench.dereg(&guest, bind.region), Ok(()));
    // By the number: which low byte is the present one, the driver need not know.
    bench.world.ok(&guest, guest.ctx, Command::MwDealloc(bind.present));
    assert_eq!((faults.live().0.mws, faults.live().0.mrs), (0, 1));
    let gone = bench.world.execute(&guest, guest.ctx, Command::MwDealloc(bind.present));
    assert_eq!(gone.unwrap_err(), Status::NOENT);
}

#[test]
fn binds_that_the_host_is_not_asked_for() {
    let mut bench = Bench::new();
    let (mut guest, faults) = bench.guest(1, 1);
    let mut neighbour = bench.guest_on(1, 2, &faults);
    let Reply::Object(other_pd) = bench.world.ok(&guest, guest.ctx, Command::PdCreate) else {
        panic!("a domain")
    };
    let (pdn, their_pd) = (guest.pd, neighbour.pd);
    let (at, region) = bench.region(&mut guest, pdn, BINDABLE);
    let (plain_at, plain) = bench.region(&mut guest, pdn, ALL);
    let (still_at, still) = bench.region(&mut guest, pdn, READ | access::MW_BIND);
    let (far_at, far) = bench.region(&mut guest, other_pd, BINDABLE);
    let (their_at, theirs) = bench.region(&mut neighbour, their_pd, BINDABLE);
    let their_window = bench.window(&neighbour, mw_type::TYPE1);
    for (what, region, range, rights, key) in [
        ("another guest's region", theirs, (their_at, 64), READ, None),
        ("a region of another domain", far, (far_at, 64), READ, None),
        ("no right to bind", plain, (plain_at, 64), READ, None),
        ("peers would write what the guest may not", still, (still_at, 64), WRITE, None),
        ("a right that no window gives", region, (at, 64), access::LOCAL_WRITE, None),
        ("before the region", region, (at - 1, 64), READ, None),
        ("beyond the region", region, (at + 8191, 2), READ, None),
        ("a length that wraps", region, (at + 8, u64::MAX - 4), READ, None),
        ("no region", 0, (at, 64), READ, None),
        ("a type 1 window without addresses", region, (at, 64), READ | access::ZERO_BASED, None),
        ("another guest's window", region, (at, 64), READ, Some((their_window, their_window ^ 1))),
        ("no window", region, (at, 64), READ, Some((0x7777_0000, 0x7777_0001))),
    ] {
        let (mut a, _) = bench.pair(&mut guest);
        let own = bench.window(&guest, mw_type::TYPE1);
        let (present, new) = key.unwrap_or((own, own ^ 1));
        let bind = Bind { present, new, region, range, rights };
        assert_eq!(
            bench.run(&guest, &mut a, &[bind.wqe(1)]),
            [(1, wc_status::MW_BIND_ERR)],
            "{what}"
        );
        assert_eq!(bench.world.query(&guest, &a).qp_state, qps::ERR, "{what}");
        bench.world.ok(&guest, guest.ctx, Command::QpDestroy(a.qpn));
    }
    let own = bench.window(&guest, mw_type::TYPE1);
    let (mut a, _) = bench.pair(&mut guest);
    let stale = Bind { present: own ^ 4, new: own ^ 1, region, range: (at, 64), rights: READ };
    assert_eq!(bench.run(&guest, &mut a, &[stale.wqe(1)]), [(1, wc_status::MW_BIND_ERR)]);
    // The low byte of the new key is the guest's to choose; the rest of it means nothing.
    let (mut a, _) = bench.pair(&mut guest);
    let odd = Bind { present: own, new: own ^ 0x101, region, range: (at, 64), rights: READ };
    assert_eq!(bench.run(&guest, &mut a, &[odd.wqe(1)]), [(1, wc_status::SUCCESS)]);
    let dealloc = Command::MwDealloc(their_window);
    assert_eq!(bench.world.execute(&guest, guest.ctx, dealloc).unwrap_err(), Status::NOENT);
    let foreign = Command::MwAlloc { pdn: 99, kind: mw_type::TYPE1 };
    assert_eq!(bench.world.execute(&guest, guest.ctx, foreign).unwrap_err(), Status::NOENT);
    let unknown = Command::MwAlloc { pdn: guest.pd, kind: 3 };
    assert_eq!(bench.world.execute(&guest, guest.ctx, unknown).unwrap_err(), Status::INVAL);
}

#[test]
fn a_window_of_type_2_is_its_queue_pairs_and_freed_by_owner_or_peer() {
    let mut bench = Bench::new();
    let (mut guest, _, (mut a, mut b), bind) = bench.scene(mw_type::TYPE2);
    // One work request after the other, as far as any of them is known to have been executed.
    let key = bind.new;
    let again = Bind { present: key, new: key ^ 2, ..bind };
    assert_eq!(
        bench.run(&guest, &mut a, &[bind.wqe(1), invalidate(key, 2), again.wqe(3)]),
        [(1, 0), (2, 0), (3, 0)]
    );
    assert_eq!(bench.dereg(&guest, bind.region), Err(Status::BUSY));
    let key = again.new;
    let (mut c, _) = bench.pair(&mut guest);
    let refused = bench.run(&guest, &mut c, &[invalidate(key, 4)]);
    assert_eq!(refused, [(4, wc_status::LOC_QP_OP_ERR)], "another QP's");
    guest.post_receive(&mut a, 50, &[]);
    bench.world.settle();
    let send = abi::SqWqe { imm: U32::new(key), ..wqe(opcode::SEND_WITH_INV, SIGNALED, 5) };
    assert_eq!(bench.run(&guest, &mut b, &[send]), [(5, 0)]);
    assert_eq!(guest.drain(&mut a.cq)[0].imm.get(), key);
    // Free, so it can be bound; bound, so it can not.
    let third = Bind { present: key, new: key ^ 4, ..bind };
    assert_eq!(bench.run(&guest, &mut a, &[third.wqe(6)]), [(6, 0)]);
    let twice = Bind { present: third.new, ..bind };
    assert_eq!(bench.run(&guest, &mut a, &[twice.wqe(7)]), [(7, wc_status::MW_BIND_ERR)]);
    let (mut d, _) = bench.pair(&mut guest);
    let empty = Bind { present: third.new, range: (0, 0), ..bind };
    assert_eq!(bench.run(&guest, &mut d, &[empty.wqe(8)]), [(8, wc_status::MW_BIND_ERR)]);
}

#[test]
fn regions_and_windows_of_other_types_are_not_invalidated() {
    let mut bench = Bench::new();
    let (mut guest, _, (mut a, _), bind) = bench.scene(mw_type::TYPE1);
    assert_eq!(bench.run(&guest, &mut a, &[bind.wqe(1)]), [(1, 0)]);
    for key in [bind.new, bind.region, 0] {
        let (mut b, _) = bench.pair(&mut guest);
        let refused = bench.run(&guest, &mut b, &[invalidate(key, 2)]);
        assert_eq!(refused, [(2, wc_status::LOC_QP_OP_ERR)]);
    }
}

#[test]
fn what_was_not_executed_has_changed_nothing() {
    let mut bench = Bench::new();
    let (mut guest, faults, (mut a, _), bind) = bench.scene(mw_type::TYPE2);
    faults.fail_send(wc_status::MW_BIND_ERR);
    assert_eq!(bench.run(&guest, &mut a, &[bind.wqe(1)]), [(1, wc_status::MW_BIND_ERR)]);
    assert_eq!(bench.dereg(&guest, bind.region), Ok(()), "nothing shows it");
    let (at, region) = {
        let pdn = guest.pd;
        bench.region(&mut guest, pdn, BINDABLE)
    };
    let bind = Bind { region, range: (at, 64), ..bind };
    let (mut b, _) = bench.pair(&mut guest);
    assert_eq!(
        bench.run(&guest, &mut b, &[bind.wqe(2)]),
        [(2, 0)],
        "its first key is the present one"
    );
    // Freed and bound anew in one burst, of which nothing is executed: it shows what it showed.
    let key = bind.new;
    let again = Bind { present: key, new: key ^ 2, ..bind };
    faults.fail_send(wc_status::LOC_QP_OP_ERR);
    assert_eq!(
        bench.run(&guest, &mut b, &[invalidate(key, 3), again.wqe(4)]),
        [(3, wc_status::LOC_QP_OP_ERR), (4, wc_status::WR_FLUSH_ERR)]
    );
    assert_eq!(bench.dereg(&guest, region), Err(Status::BUSY));
    // Refused where it is posted.
    let (mut c, _) = bench.pair(&mut guest);
    let free = bench.window(&guest, mw_type::TYPE2);
    let bind = Bind { present: free, new: free ^ 1, ..bind };
    faults.refuse(Call::PostSend, libc::EINVAL);
    assert_eq!(bench.run(&guest, &mut c, &[bind.wqe(5)])[0].0, 5);
    faults.refuse(Call::PostSend, 0);
    let (mut d, _) = bench.pair(&mut guest);
    assert_eq!(bench.run(&guest, &mut d, &[bind.wqe(6)]), [(6, 0)]);
}

#[test]
fn the_end_of_a_queue_pair_takes_its_windows_from_the_host() {
    let mut bench = Bench::new();
    let (guest, faults, (mut a, _), bind) = bench.scene(mw_type::TYPE2);
    assert_eq!(bench.run(&guest, &mut a, &[bind.wqe(1)]), [(1, 0)]);
    bench.world.ok(&guest, guest.ctx, Command::QpDestroy(a.qpn));
    assert_eq!(faults.live().0.mws, 0, "it would hold the QP");
    assert_eq!(bench.dereg(&guest, bind.region), Err(Status::BUSY), "the guest still has it");
    bench.world.ok(&guest, guest.ctx, Command::MwDealloc(bind.new));
    assert_eq!(bench.dereg(&guest, bind.region), Ok(()));
}

#[test]
fn memory_that_goes_takes_the_windows_to_it_along() {
    let mut bench = Bench::new();
    let (guest, faults, (mut a, _), bind) = bench.scene(mw_type::TYPE1);
    let idle = bench.window(&guest, mw_type::TYPE1);
    assert_eq!(bench.run(&guest, &mut a, &[bind.wqe(1)]), [(1, 0)]);
    bench.world.shard.memory_changed(guest.nic, AddressSpace::default());
    while bench.world.shard.follow_memory(guest.nic) {}
    bench.world.settle();
    drop(bench.world.shard.take_deferred_drops(guest.nic));
    let live = faults.live().0;
    assert_eq!((live.mrs, live.mws), (0, 1), "only the idle window is left");
    bench.world.shard.remove_nic(guest.nic);
    drop(bench.world.shard.take_deferred_drops(guest.nic));
    assert_eq!(faults.live(), (HostObjects::default(), 0));
    assert_ne!(idle, bind.present);
}

#[test]
fn the_end_of_a_context_looks_at_no_windows_of_others() {
    let mut bench = Bench::new();
    let (mut guest, _faults) = bench.guest(1, 1);
    let costs = |bench: &mut Bench, guest: &mut Guest| {
        let at = guest.alloc(4096);
        let db_page = Ring::page(&guest.space, at).unwrap();
        let made = bench.world.ok(guest, 0, Command::ContextCreate { db_page });
        let Reply::Context(context) = made else { panic!("{made:?}") };
        let before = bench.world.shard.charged();
        bench.world.ok(guest, context.ctx.get(), Command::ContextDestroy);
        bench.world.shard.charged() - before
    };
    let alone = costs(&mut bench, &mut guest);
    for _ in 0..driver::limits().max_mrs {
        bench.window(&guest, mw_type::TYPE2);
    }
    let beside = costs(&mut bench, &mut guest);
    assert!(beside <= 2 * alone, "{alone} ns alone, {beside} ns beside windows of another");
}

#[test]
fn a_host_without_windows_left_says_so() {
    let mut bench = Bench::new();
    let (guest, faults) = bench.guest(1, 1);
    let make = |bench: &mut Bench| {
        let command = Command::MwAlloc { pdn: guest.pd, kind: mw_type::TYPE2 };
        bench.world.execute(&guest, guest.ctx, command).map(drop)
    };
    faults.refuse(Call::AllocMw, libc::ENOMEM);
    assert_eq!(make(&mut bench), Err(Status::NOMEM));
    faults.refuse(Call::AllocMw, 0);
    for _ in 0..driver::limits().max_mrs {
        assert_eq!(make(&mut bench), Ok(()));
    }
    assert_eq!(make(&mut bench), Err(Status::NOMEM));
    assert_eq!(faults.live().0.mws, driver::limits().max_mrs as usize);
    bench.world.ok(&guest, guest.ctx, Command::ContextDestroy);
    assert_eq!(faults.live().0, HostObjects::default());
}

/// For tests of what is many: a region, and a window of type 2 that is bound to it.
impl Bench {
    pub(super) fn bindable(&mut self, guest: &mut Guest) -> (u64, u32) {
        let pdn = guest.pd;
        self.region(guest, pdn, BINDABLE)
    }

    pub(super) fn bind_one(
        &mut self,
        guest: &Guest,
        qp: &mut Qp,
        (at, region): (u64, u32),
        wr_id: u64,
    ) -> Vec<(u64, u8)> {
        let present = self.window(guest, mw_type::TYPE2);
        let range = (at, 64);
        let bind = Bind { present, new: present ^ 1, region, range, rights: READ };
        self.run(guest, qp, &[bind.wqe(wr_id)])
    }
}

/// The region is free when the last window that shows it is gone, whatever the order of binds,
/// failures and ends was.
#[test]
fn a_region_knows_how_many_windows_show_it() {
    let mut bench = Bench::new();
    let (guest, faults, (mut a, mut b), bind) = bench.scene(mw_type::TYPE2);
    let other = bench.window(&guest, mw_type::TYPE2);
    let twice = Bind { present: other, new: other ^ 1, ..bind };
    assert_eq!(bench.run(&guest, &mut a, &[bind.wqe(1)]), [(1, 0)]);
    assert_eq!(bench.run(&guest, &mut b, &[twice.wqe(2)]), [(2, 0)]);
    assert_eq!(bench.run(&guest, &mut a, &[invalidate(bind.new, 3)]), [(3, 0)]);
    assert_eq!(bench.dereg(&guest, bind.region), Err(Status::BUSY), "the other shows it");
    bench.world.ok(&guest, guest.ctx, Command::QpDestroy(b.qpn));
    assert_eq!(faults.live().0.mws, 1, "the end of its QP is its own");
    bench.world.ok(&guest, guest.ctx, Command::MwDealloc(other));
    assert_eq!(bench.dereg(&guest, bind.region), Ok(()));
    bench.world.ok(&guest, guest.ctx, Command::QpDestroy(a.qpn));
    assert_eq!(faults.live().0.mws, 1, "that of a QP which it is free of is not");
}
