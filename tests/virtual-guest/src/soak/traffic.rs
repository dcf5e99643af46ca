//! A connection that stays: whatever the others do, its bytes arrive.

use std::sync::atomic::Ordering;

use super::Shared;
use crate::qp::{Path, QpSpec, SendWr};
use crate::spec::qpt;
use crate::world::{Node, pattern};

/// The longest message.
const LONGEST: u64 = 96 << 10;

/// Moves data from `a` to `b` and back, and compares it.
pub(super) fn run(a: &Node, b: &Node, shared: &Shared) {
    let spec = QpSpec::new(qpt::RC);
    let (mut x, mut y) = (a.end(&spec), b.end(&spec));
    x.connect(&y, &Path::default());
    y.connect(&x, &Path::default());
    let (source, back) = (a.area(LONGEST), a.area(LONGEST));
    let (target, inbox) = (b.area(LONGEST), b.area(LONGEST));
    let mut n = 0;
    while shared.goes_on() {
        let len = 1 + n * 7919 % LONGEST;
        let bytes = pattern(n, len as usize);
        source.mr.view().write(crate::world::GUARD, &bytes);
        x.run_ok(&SendWr::write(n, &[source.part(0, len)], target.addr(0), target.rkey()));
        assert_eq!(&target.bytes()[..len as usize], &bytes[..], "write {n}");
        x.run_ok(&SendWr::read(n, &[back.part(0, len)], target.addr(0), target.rkey()));
        assert_eq!(&back.bytes()[..len as usize], &bytes[..], "read {n}");
        y.qp.post_recv(n, &[inbox.sge()]);
        x.run_ok(&SendWr::send(n, &[source.part(0, len)]));
        let received = y.rcq.ok();
        assert_eq!((received.wr_id, u64::from(received.byte_len)), (n, len));
        assert_eq!(&inbox.bytes()[..len as usize], &bytes[..], "send {n}");
        n += 1;
        shared.messages.fetch_add(3, Ordering::Relaxed);
    }
}
