//! A process names its own objects, and no other's; and gives no command that is a kernel's.

use virtual_guest::qp::{Path, QpSpec};
use virtual_guest::rings::{Cq, Srq};
use virtual_guest::spec::{Put, access, cmd, err, qpt};
use virtual_guest::world::ipv4_gid;

use crate::scene::{Scene, status};

fn object(number: u32) -> Vec<u8> {
    Put::new().u32(number).u32(0).done(8)
}

#[test]
fn no_object_of_another_process_can_be_named() {
    let scene = Scene::new();
    let (owner, thief) = (scene.blue(), scene.blue());
    let end = owner.rc();
    let srq = Srq::create(&owner.ctx, owner.pdn, 16, 1, 0).unwrap();
    let mr = owner.mr(4096);
    let av = virtual_guest::attr::Av::to(ipv4_gid(9, 2));
    let ah = owner.ctx.create_ah(owner.pdn, &av).unwrap();
    let window = Put::new().u32(owner.pdn).u32(1).done(8);
    let mw = owner.ctx.command(cmd::MW_ALLOC, &window, 8).unwrap();
    let mw = u32::from_le_bytes(mw[..4].try_into().unwrap());
    for (opcode, number, len) in [
        (cmd::PD_DESTROY, owner.pdn, 0),
        (cmd::MR_DEREG, mr.lkey, 0),
        (cmd::MW_DEALLOC, mw, 0),
        (cmd::CQ_DESTROY, end.scq.cqn, 0),
        (cmd::SRQ_DESTROY, srq.srqn, 0),
        (cmd::SRQ_QUERY, srq.srqn, 16),
        (cmd::QP_DESTROY, end.qp.qpn, 0),
        (cmd::QP_QUERY, end.qp.qpn, 128),
        (cmd::AH_DESTROY, ah, 0),
    ] {
        // Also if the command says that it is of the owner's context.
        for ctx in [thief.ctx.id(), owner.ctx.id()] {
            let tried = thief.guest.command(opcode, ctx, &object(number), len);
            assert_eq!(status(tried), err::NOENT, "{opcode:#x}");
        }
    }
    // Nor can an object be made of another's.
    let (cq, pdn) = (thief.cq(16), thief.pdn);
    let spec = QpSpec::new(qpt::RC);
    let make = virtual_guest::qp::Qp::create;
    assert_eq!(status(make(&thief.ctx, owner.pdn, &cq, &cq, &spec)), err::NOENT);
    assert_eq!(status(make(&thief.ctx, pdn, &end.scq, &cq, &spec)), err::NOENT);
    assert_eq!(status(make(&thief.ctx, pdn, &cq, &end.rcq, &spec)), err::NOENT);
    assert_eq!(status(make(&thief.ctx, pdn, &cq, &cq, &spec.with_srq(&srq))), err::NOENT);
    assert_eq!(status(thief.ctx.mr(owner.pdn, 4096, access::ALL)), err::NOENT);
    assert_eq!(status(Srq::create(&thief.ctx, owner.pdn, 16, 1, 0)), err::NOENT);
    assert_eq!(status(thief.ctx.create_ah(owner.pdn, &av)), err::NOENT);
    let peer = scene.red().rc();
    assert_eq!(status(end_of(&thief, &end).connect(peer.address(), &Path::default())), err::NOENT);
    // The owner has lost nothing.
    end.connect(&peer, &Path::default());
    assert!(Cq::create(&owner.ctx, 16, 0).is_ok());
}

/// A queue pair of one process as another would name it.
fn end_of(
    thief: &virtual_guest::world::Node,
    end: &virtual_guest::world::End,
) -> virtual_guest::qp::Qp {
    let mut own = thief.rc().qp;
    own.qpn = end.qp.qpn;
    own
}

#[test]
fn what_is_a_kernels_is_refused() {
    let scene = Scene::new();
    let node = scene.blue();
    let gid = Put::new().u16(0).u8(2).zero(5).bytes(&ipv4_gid(9, 9)).done(24);
    let init = Put::new().u32(1).u32(0).u64(7).u64(0).u64(0).done(32);
    let key = Put::new().u32(node.pdn).u32(7).done(8);
    for (opcode, body, len) in [
        (cmd::INIT, init, 16),
        (cmd::SHUTDOWN, Vec::new(), 0),
        (cmd::GID_SET, gid, 0),
        (cmd::CONTEXT_DESTROY, Vec::new(), 0),
        (cmd::MR_DMA, key.clone(), 8),
        (cmd::MR_ALLOC, key, 8),
    ] {
        for ctx in [0, node.ctx.id()] {
            assert_eq!(status(node.guest.command(opcode, ctx, &body, len)), err::PERM);
        }
    }
    assert_eq!(status(node.guest.open()), err::EXIST, "a session has one context");
    let cq = node.cq(16);
    let gsi = QpSpec::new(qpt::GSI);
    let made = virtual_guest::qp::Qp::create(&node.ctx, node.pdn, &cq, &cq, &gsi);
    assert_eq!(status(made), err::PERM, "QP 1 is the connection manager's");
    assert_eq!(scene.objects("blue")["contexts"], 1);
}

#[test]
fn memory_is_named_by_addresses_that_the_process_has_shared() {
    let scene = Scene::new();
    let (node, other) = (scene.blue(), scene.blue());
    // Memory of the other process's own, where this one has none.
    other.guest.process().add_memory((0x7000_0000, 0x1000, 0), sealed(0x1000).as_fd()).unwrap();
    let register = |node: &virtual_guest::world::Node, addr: u64, levels: u8| {
        let list = Put::new().u64(addr).u32(1).u32(0).u8(12).u8(levels).zero(6).done(24);
        let head = Put::new().u32(node.pdn).u32(1).u64(0x1000).u64(0x1000).done(24);
        node.ctx.command(cmd::MR_REG, &[head, list].concat(), 8)
    };
    register(&other, 0x7000_0000, 0).unwrap();
    assert_eq!(status(register(&node, 0x7000_0000, 0)), err::FAULT);
    let ram = node.guest.ram().regions()[0].gpa();
    register(&node, ram, 0).unwrap();
    assert_eq!(status(register(&node, ram, 1)), err::INVAL, "lists are not a process's");
    // Windows begin at multiples of 2^47, and none of them can be named.
    for number in 0..4u64 {
        for bits in 47..64 {
            let addr = (number << 47 | 1 << bits | ram) & !0xfff;
            if addr != ram {
                assert_eq!(status(register(&node, addr, 0)), err::FAULT, "{addr:#x}");
            }
        }
    }
    assert_eq!(status(register(&node, 0, 0)), err::FAULT, "the status page is the device's");
}

use std::os::fd::AsFd as _;

pub(crate) fn sealed(len: u64) -> std::fs::File {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let file = memfd_create("sealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, len).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    file.into()
}
