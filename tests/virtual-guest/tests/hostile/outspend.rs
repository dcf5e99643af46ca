//! Memory of the daemon's own that a guest can make it keep. Everything is kept for somebody, and
//! has an end that somebody chose.

use virtual_guest::guest::GuestConfig;
use virtual_guest::pages::PageList;
use virtual_guest::process::Process;
use virtual_guest::qp::{Av, Qp, QpSpec};
use virtual_guest::rings::Srq;
use virtual_guest::spec::{PAGE, Put, access, cmd, err, qpt};
use virtual_guest::world::{Door, Node};

use crate::DOOR;
use crate::scene::{Scene, case_within};

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

/// Bytes of the daemon's that are taken, and bytes that it says it keeps for the villain.
fn cost(scene: &Scene) -> [u64; 2] {
    let shown = scene.world.daemon.show_nic(&scene.place.name);
    let kept = shown["objects"]["kept_bytes"].as_u64().expect("kept_bytes");
    [scene.world.daemon.vitals().memory, kept]
}

/// What the account says and what the daemon took since differ by no more than a factor: it charges
/// what objects may come to, such as events that wait and half-empty tables.
#[track_caller]
fn agrees(what: &str, scene: &Scene, before: [u64; 2]) {
    /// Pages of the allocator, and of whoever else is there.
    const NOISE: u64 = 1 << 20;
    let now = cost(scene);
    let [took, kept] = [0, 1].map(|n: usize| now[n].saturating_sub(before[n]));
    println!("{what}: {took} bytes taken, {kept} charged");
    assert!(took <= kept + NOISE, "{what}: the daemon took {took} bytes and charged {kept}");
    assert!(kept <= 8 * took + NOISE, "{what}: the daemon took {took} bytes and charged {kept}");
}

/// How many can be made until the device says that there is no room; never more than `limit`.
#[track_caller]
fn fill(what: &str, limit: u32, make: &mut dyn FnMut() -> Result<(), Option<u32>>) {
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

/// As many objects of each kind as there may be, each charged.
fn everything(scene: &Scene, node: &Node) {
    let fill = |what: &str, limit: u32, make: &mut dyn FnMut() -> Result<(), Option<u32>>| {
        let before = cost(scene);
        fill(what, limit, make);
        agrees(what, scene, before);
    };
    let limit = |name: &str| LIMITS.iter().find(|(n, _)| *n == name).expect("a limit").1;
    let page = node.guest.ram().alloc(1);
    page.view(0, PAGE).fill(0, PAGE, 0);
    let one = PageList::contiguous(page.gpa(0), 1, 0, 12);
    let ctx = &node.ctx;
    fill("regions", limit("--max-mrs"), &mut || {
        status(ctx.mr_reg(node.pdn, access::ALL, (0, PAGE), &one))
    });
    let av = Av::to(node.gid);
    fill("address handles", limit("--max-ahs"), &mut || status(ctx.create_ah(node.pdn, &av)));
    let (scq, rcq) = (node.cq(16), node.cq(16));
    let spec = QpSpec { sq: 1, rq: 1, send_sge: 1, recv_sge: 1, inline: 0, ..QpSpec::new(qpt::UD) };
    let mut doorbells = 0;
    fill("queue pairs", limit("--max-qps"), &mut || {
        doorbells += 2;
        if doorbells % 800 == 0 {
            ctx.add_doorbell_page().expect("DB_PAGE_ADD: the others are full");
        }
        status(Qp::create(ctx, node.pdn, &scq, &rcq, &spec))
    });
    // The same doorbells are there for shared receive queues.
    let _more = ctx.add_doorbell_page();
    fill("shared receive queues", limit("--max-srqs"), &mut || {
        status(Srq::create(ctx, node.pdn, 1, 1, 0))
    });
    let cq = Put::new().u32(16).u32(0).bytes(&one.bytes()).done(32);
    fill("completion queues", limit("--max-cqs"), &mut || {
        status(ctx.command(cmd::CQ_CREATE, &cq, 8))
    });
    fill("domains", limit("--max-pds"), &mut || status(ctx.create_pd()));
    let context = Put::new().u64(page.gpa(0)).done(8);
    let mut sessions = Vec::new();
    fill("contexts", limit("--max-contexts"), &mut || match DOOR {
        Door::Monitor => status(ctx.command(cmd::CONTEXT_CREATE, &context, 8)),
        // A process's context is its session.
        Door::Process => status(Process::connect(&node.socket).map(|it| sessions.push(it))),
    });
}

fn lower(scene: &Scene) {
    let limits: Vec<String> =
        LIMITS.iter().flat_map(|(name, n)| [(*name).to_owned(), n.to_string()]).collect();
    let mut args = vec!["nic", "set", &scene.place.name];
    args.extend(limits.iter().map(String::as_str));
    scene.world.daemon.run(&args);
}

/// An eighth of everything that a NIC may have by default: what is kept for each object is small
/// and of one size.
#[test]
fn objects_to_their_limits_stay_within_the_budget() {
    // Or what the daemon takes grows by whole huge pages, where the host gives them to everybody.
    // The daemon has this from its parent.
    rustix::thread::disable_transparent_huge_pages(true).expect("PR_SET_THP_DISABLE");
    case_within(24 << 20, |scene| {
        lower(scene);
        let node =
            scene.villain_with(GuestConfig { ram_bytes: 64 << 20, ..GuestConfig::default() });
        scene.during(|| everything(scene, &node));
        scene.is_within_its_budget();
        node.guest.works();
    });
}

/// A NIC's account, whatever the limits of its objects: beyond it nothing is made, what ends is
/// given back, and another limit holds at once.
#[test]
fn a_full_account_refuses_and_what_ends_is_given_back() {
    const LITTLE: u64 = 4 << 20;
    case_within(8 << 20, |scene| {
        let set = |bytes: &str| {
            let args = ["nic", "set", &scene.place.name, "--max-kept-bytes", bytes];
            scene.world.daemon.run(&args);
        };
        set("4M");
        let node =
            scene.villain_with(GuestConfig { ram_bytes: 64 << 20, ..GuestConfig::default() });
        let ctx = &node.ctx;
        let (scq, rcq) = (node.cq(16), node.cq(16));
        let spec = QpSpec { sq: 1, rq: 1, send_sge: 1, recv_sge: 1, ..QpSpec::new(qpt::UD) };
        let mut qps = Vec::new();
        let make = || Qp::create(ctx, node.pdn, &scq, &rcq, &spec).map_err(|e| e.status());
        let refused = |result: Result<Qp, Option<u32>>| match result {
            Ok(_) => panic!("the account is full"),
            Err(status) => assert_eq!(status, Some(err::NOMEM)),
        };
        while let Ok(qp) = make() {
            qps.push(qp);
            if qps.len() % 400 == 0 {
                ctx.add_doorbell_page().expect("DB_PAGE_ADD");
            }
        }
        refused(make());
        let [_, full] = cost(scene);
        assert!((LITTLE / 2..=LITTLE).contains(&full), "{full} bytes for {} QPs", qps.len());
        // Nothing of another kind either, and lists neither.
        let page = node.guest.ram().alloc(1);
        page.view(0, PAGE).fill(0, PAGE, 0);
        let one = PageList::contiguous(page.gpa(0), 1, 0, 12);
        let region = || status(ctx.mr_reg(node.pdn, access::ALL, (0, PAGE), &one));
        let refusal = (0..4096).find_map(|_| region().err());
        assert_eq!(refusal, Some(Some(err::NOMEM)), "regions");
        let refusal = (0..4096).find_map(|_| status(ctx.create_pd()).err());
        assert_eq!(refusal, Some(Some(err::NOMEM)), "domains");
        let [_, full] = cost(scene);
        assert!(full <= LITTLE && LITTLE - full < 4096, "{full} bytes");
        // What ends makes room; not for everything, since tables keep their places.
        qps.pop().expect("many").destroy().expect("QP_DESTROY");
        qps.push(make().unwrap_or_else(|status| panic!("room for one again: {status:?}")));
        refused(make());
        // Lowered below what is there it takes nothing away.
        set("1M");
        node.guest.works();
        refused(make());
        set("5M");
        qps.push(make().unwrap_or_else(|status| panic!("more is allowed: {status:?}")));
        match DOOR {
            Door::Monitor => drop(node.guest.init().expect("INIT")),
            Door::Process => {
                node.guest.disconnect();
                scene.await_state("absent");
                // The first one that comes begins anew.
                drop(scene.villain());
            }
        }
        let [_, none] = cost(scene);
        assert!(none < 1 << 20, "a new driver begins with {none} bytes");
    });
}
