//! Memory of the daemon's own that a guest can make it keep. Everything is kept for somebody, and has an end that somebody chose.

use virtual_guest::guest::GuestConfig;
use virtual_guest::pages::PageList;
use virtual_guest::qp::{Av, Qp, QpSpec};
use virtual_guest::rings::Srq;
use virtual_guest::spec::{PAGE, Put, Take, access, cmd, err, qpt};
use virtual_guest::world::Node;

use crate::scene::{Scene, case_within};

const PLUGGED: u64 = 0x2_0000_0000;

/// A key for all of the guest's memory is a key, however many pieces the memory has.
#[test]
fn keys_for_all_of_a_memory_in_pieces_share_it() {
    const PIECES: u64 = 200;
    const KEYS: usize = 12_000;
    case_within(24 << 20, |scene| {
        let config = GuestConfig { memory_table: false, ..GuestConfig::default() };
        let node = scene.villain_with(config);
        // Gaps between them, so that each is a region of its own.
        for n in 0..PIECES {
            node.guest.add_memory(PLUGGED + n * 2 * PAGE, PAGE).expect("ADD_MEM_REG");
        }
        let kernel = node.guest.kernel().expect("the kernel's context");
        let pdn = kernel.create_pd().expect("PD_CREATE");
        let mut made = 0;
        scene.during(|| {
            while made < KEYS {
                match kernel.mr_dma(pdn, access::ALL) {
                    Ok(_) => made += 1,
                    Err(refused) => {
                        assert_eq!(refused.status(), Some(err::NOMEM), "after {made} keys");
                        break;
                    }
                }
            }
        });
        assert!(made > 0, "a kernel needs one");
        scene.is_within_its_budget();
        node.guest.keepalive().expect("the NIC works");
    });
}

/// The limits that the case sets: an eighth of what a NIC has by default.
const LIMITS: [(&str, u32); 7] = [
    ("--max-contexts", 128),
    ("--max-pds", 512),
    ("--max-mrs", 8192),
    ("--max-cqs", 2048),
    ("--max-srqs", 512),
    ("--max-qps", 2048),
    ("--max-ahs", 8192),
];

/// How many can be made until the device says that there is no room; never more than `limit`.
#[track_caller]
fn fill(what: &str, limit: u32, mut make: impl FnMut() -> Result<(), Option<u32>>) {
    for made in 0..=limit {
        if let Err(status) = make() {
            assert_eq!(status, Some(err::NOMEM), "{what}: refused after {made}");
            assert!(made > 0, "{what}: not one");
            return;
        }
    }
    panic!("{what}: more than the limit of {limit}");
}

fn status<T>(answer: virtual_guest::guest::Result<T>) -> Result<(), Option<u32>> {
    answer.map(drop).map_err(|e| e.status())
}

/// As many objects of each kind as there may be.
fn everything(node: &Node) {
    let limit = |name: &str| LIMITS.iter().find(|(n, _)| *n == name).expect("a limit").1;
    let page = node.guest.ram().alloc(1);
    page.view(0, PAGE).fill(0, PAGE, 0);
    let one = PageList::contiguous(page.gpa(0), 1, 0, 12);
    let ctx = &node.ctx;
    fill("regions", limit("--max-mrs"), || {
        status(ctx.mr_reg(node.pdn, access::ALL, (0, PAGE), &one))
    });
    let av = Av::to(node.gid);
    fill("address handles", limit("--max-ahs"), || status(ctx.create_ah(node.pdn, &av)));
    let (scq, rcq) = (node.cq(16), node.cq(16));
    let spec = QpSpec { sq: 1, rq: 1, send_sge: 1, recv_sge: 1, inline: 0, ..QpSpec::new(qpt::UD) };
    let mut doorbells = 0;
    fill("queue pairs", limit("--max-qps"), || {
        doorbells += 2;
        if doorbells % 800 == 0 {
            ctx.add_doorbell_page().expect("DB_PAGE_ADD: the others are full");
        }
        status(Qp::create(ctx, node.pdn, &scq, &rcq, &spec))
    });
    // The same doorbells are there for shared receive queues.
    let _more = ctx.add_doorbell_page();
    fill("shared receive queues", limit("--max-srqs"), || {
        status(Srq::create(ctx, node.pdn, 1, 1, 0))
    });
    let cq = Put::new().u32(16).u32(0).bytes(&one.bytes()).done(32);
    fill("completion queues", limit("--max-cqs"), || status(ctx.command(cmd::CQ_CREATE, &cq, 8)));
    fill("domains", limit("--max-pds"), || status(ctx.create_pd()));
    let context = Put::new().u64(page.gpa(0)).done(8);
    fill("contexts", limit("--max-contexts"), || {
        let made = ctx.command(cmd::CONTEXT_CREATE, &context, 8).map(|b| b.u32_at(0));
        made.map(drop).map_err(|e| e.status())
    });
}

fn lower(scene: &Scene) {
    let limits: Vec<String> =
        LIMITS.iter().flat_map(|(name, n)| [(*name).to_owned(), n.to_string()]).collect();
    let mut args = vec!["nic", "set", &scene.place.name];
    args.extend(limits.iter().map(String::as_str));
    scene.world.daemon.run(&args);
}

/// An eighth of everything that a NIC may have by default: what is kept for each object is small and of one size.
#[test]
fn objects_to_their_limits_stay_within_the_budget() {
    case_within(24 << 20, |scene| {
        lower(scene);
        let node =
            scene.villain_with(GuestConfig { ram_bytes: 64 << 20, ..GuestConfig::default() });
        scene.during(|| everything(&node));
        scene.is_within_its_budget();
        node.guest.keepalive().expect("the NIC works");
    });
}
