//! The whole state table of queue pairs: which attributes each step takes, and what they may be
//! (8.2).

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test on a 64-bit host"
)]

use virtual_guest::qp::{Attr, Av, Path, Qp, QpSpec};
use virtual_guest::spec::{access, attr, err, qps, qpt};
use virtual_guest::world::{Node, World};

#[track_caller]
fn refused<T: std::fmt::Debug>(what: &str, got: virtual_guest::guest::Result<T>, expected: u32) {
    match got {
        Err(e) => assert_eq!(e.status(), Some(expected), "{what}: {e}"),
        Ok(v) => panic!("{what}: accepted with {v:?}, expected status {expected}"),
    }
}

/// The attributes that take a queue pair of `kind` from one state to the next.
fn step(qp: &Qp, node: &Node, to: u8) -> Attr {
    let path = Path::default();
    match to {
        qps::INIT => qp.init_attr(access::ALL, 0x1234),
        qps::RTR => qp.rtr_attr((node.gid, qp.qpn), &path),
        _ => qp.rts_attr(&path),
    }
}

#[test]
fn every_required_attribute_is_required_and_every_other_refused() {
    let world = World::new();
    let node = world.node();
    let (scq, rcq) = (node.cq(16), node.cq(16));
    for kind in [qpt::RC, qpt::UC, qpt::UD] {
        let qp = Qp::create(&node.ctx, node.pdn, &scq, &rcq, &QpSpec::new(kind)).unwrap();
        let optional = |to: u8| match (to, kind) {
            (qps::RTR, qpt::UD) => attr::PKEY_INDEX | attr::QKEY,
            (qps::RTR, _) => attr::ACCESS_FLAGS | attr::PKEY_INDEX,
            (qps::RTS, qpt::RC) => attr::CUR_STATE | attr::ACCESS_FLAGS | attr::MIN_RNR_TIMER,
            (qps::RTS, qpt::UC) => attr::CUR_STATE | attr::ACCESS_FLAGS,
            (qps::RTS, _) => attr::CUR_STATE | attr::QKEY,
            _ => 0,
        };
        for (from, to) in [(qps::RESET, qps::INIT), (qps::INIT, qps::RTR), (qps::RTR, qps::RTS)] {
            let good = step(&qp, &node, to);
            for bit in 0..21 {
                let flag = 1 << bit;
                if flag == attr::STATE || flag == attr::ALT_PATH || flag == attr::PATH_MIG_STATE {
                    continue;
                }
                let mut tried = Attr { mask: good.mask ^ flag, ..good };
                if good.mask & flag == 0 && optional(to) & flag != 0 {
                    continue;
                }
                tried.cur_state = from;
                refused(&format!("kind {kind} to {to}, bit {bit}"), qp.modify(&tried), err::INVAL);
                assert_eq!(qp.state().unwrap(), from, "a refused modification changes nothing");
            }
            qp.modify(&good).unwrap();
            assert_eq!(qp.state().unwrap(), to);
        }
        // No step may be left out.
        qp.modify(&Attr::state(qps::RESET)).unwrap();
        refused("RESET to RTR", qp.modify(&step(&qp, &node, qps::RTR)), err::INVAL);
        refused("RESET to RTS", qp.modify(&step(&qp, &node, qps::RTS)), err::INVAL);
        refused("RESET to SQD", qp.modify(&Attr::state(qps::SQD)), err::INVAL);
        refused("to a state that there is not", qp.modify(&Attr::state(7)), err::INVAL);
        qp.modify(&Attr::state(qps::ERR)).unwrap();
        refused("ERR to INIT", qp.modify(&step(&qp, &node, qps::INIT)), err::INVAL);
    }
}

#[test]
fn attribute_values_are_checked() {
    let world = World::new();
    let node = world.node();
    let end = node.rc();
    let qp = &end.qp;
    let init = step(qp, &node, qps::INIT);
    refused("port 2", qp.modify(&Attr { port: 2, ..init }), err::INVAL);
    refused("port 0", qp.modify(&Attr { port: 0, ..init }), err::INVAL);
    refused("pkey 1", qp.modify(&Attr { pkey_index: 1, ..init }), err::INVAL);
    qp.modify(&init).unwrap();
    let rtr = step(qp, &node, qps::RTR);
    refused("no GRH", qp.modify(&Attr { av: Av { flags: 0, ..rtr.av }, ..rtr }), err::INVAL);
    refused(
        "no GID there",
        qp.modify(&Attr { av: Av { sgid_index: 3, ..rtr.av }, ..rtr }),
        err::INVAL,
    );
    refused(
        "GID index",
        qp.modify(&Attr { av: Av { sgid_index: 9999, ..rtr.av }, ..rtr }),
        err::INVAL,
    );
    refused("MTU 0", qp.modify(&Attr { path_mtu: 0, ..rtr }), err::INVAL);
    refused("MTU 6", qp.modify(&Attr { path_mtu: 6, ..rtr }), err::INVAL);
    refused("QPN of 25 bits", qp.modify(&Attr { dest_qpn: 1 << 24, ..rtr }), err::INVAL);
    refused("RNR timer 32", qp.modify(&Attr { min_rnr_timer: 32, ..rtr }), err::INVAL);
    let limits = node.guest.query_device().unwrap();
    if limits.max_rd_atom < 255 {
        let many = limits.max_rd_atom as u8 + 1;
        refused("too many reads", qp.modify(&Attr { max_dest_rd_atomic: many, ..rtr }), err::INVAL);
    }
    assert_eq!(qp.state().unwrap(), qps::INIT);
    qp.modify(&rtr).unwrap();
    let rts = step(qp, &node, qps::RTS);
    refused("timeout 32", qp.modify(&Attr { timeout: 32, ..rts }), err::INVAL);
    refused("retry 8", qp.modify(&Attr { retry_cnt: 8, ..rts }), err::INVAL);
    refused("RNR retry 8", qp.modify(&Attr { rnr_retry: 8, ..rts }), err::INVAL);
    let wrong = Attr { mask: rts.mask | attr::CUR_STATE, cur_state: qps::INIT, ..rts };
    refused("present state is another", qp.modify(&wrong), err::INVAL);
    let alternative = Attr { mask: rts.mask | attr::ALT_PATH, ..rts };
    refused("path migration", qp.modify(&alternative), err::NOTSUPP);
    qp.modify(&rts).unwrap();
}

#[test]
fn query_answers_what_was_set() {
    let world = World::new();
    let node = world.node();
    let end = node.rc();
    let path = Path {
        timeout: 17,
        retry_cnt: 5,
        rnr_retry: 3,
        min_rnr_timer: 9,
        rd_atomic: 3,
        ..Path::default()
    };
    assert_eq!(end.qp.query().unwrap().state, qps::RESET);
    let peer = world.node();
    end.qp.connect((peer.gid, 0x12_3456), &path).unwrap();
    let got = end.qp.query().unwrap();
    assert_eq!((got.state, got.cur_state), (qps::RTS, qps::RTS));
    assert_eq!((got.timeout, got.retry_cnt, got.rnr_retry, got.min_rnr_timer), (17, 5, 3, 9));
    assert_eq!((got.max_rd_atomic, got.max_dest_rd_atomic), (3, 3));
    assert_eq!((got.dest_qpn, got.path_mtu, got.port, got.pkey_index), (0x12_3456, 5, 1, 0));
    assert_eq!((got.rq_psn, got.sq_psn, got.access), (0x1234, 0x1234, access::ALL));
    assert_eq!(got.av.dgid, peer.gid);
    assert_eq!((got.av.hop_limit, got.av.flags & 1), (64, 1));
    let change = Attr {
        mask: attr::MIN_RNR_TIMER | attr::ACCESS_FLAGS,
        min_rnr_timer: 4,
        access: 1,
        ..Attr::default()
    };
    end.qp.modify(&change).unwrap();
    let got = end.qp.query().unwrap();
    assert_eq!((got.min_rnr_timer, got.access, got.state), (4, 1, qps::RTS));
}
