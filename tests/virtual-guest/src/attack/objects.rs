//! Objects by the thousand: made, ended, looked at in each round.

use super::{Attack, Ground, Strike, blind_cq, rc, take_events, with_ram};
use crate::pages::PageList;
use crate::qp::{Path, Qp, QpSpec};
use crate::ram::Pages;
use crate::spec::{Put, Take, access, cmd, qpt};
use crate::world::{Door, Node};

pub(super) const ALL: &[Attack] = &[
    Attack::new("pd_destroy", "PD_DESTROY beside 65 000 regions", pd_destroy).within(48),
    Attack::new("doorbell_pages", "4096 doorbell pages, each looked at for what was posted", pages)
        .by_monitors()
        .within(24),
    Attack::new("context_ends", "CONTEXT_DESTROY of 16 000 CQs, 4000 regions and 500 QPs", context)
        .within(64),
    Attack::new("resets", "a NIC with 8000 CQs that is reset", resets).by_monitors().within(48),
    Attack::new("qp_churn", "queue pairs made, connected and destroyed", qp_churn),
    Attack::new("mr_churn", "MR_REG and MR_DEREG of 4096 pages beside 30 000 regions", mr_churn)
        .within(64),
    Attack::new("context_churn", "CONTEXT_CREATE and CONTEXT_DESTROY without end", context_churn),
    Attack::new("cq_churn", "CQ_CREATE and CQ_DESTROY without end", cq_churn),
];

/// Registers the page at `gpa` again and again; how often that went well.
fn regions(node: &Node, gpa: u64, count: usize) -> usize {
    let list = PageList::contiguous(gpa, 1, 0, 12);
    let reg = |_| node.ctx.mr_reg(node.pdn, access::ALL, (0, 4096), &list).ok();
    (0..count).map_while(reg).count()
}

fn pd_destroy(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(16));
    let page = node.guest.ram().alloc(1);
    regions(&node, page.gpa(0), ground.sized(65_000, 2000));
    Box::new(move || {
        let _held = &page;
        for _ in 0..8 {
            if let Ok(pdn) = node.ctx.create_pd() {
                let _gone = node.ctx.destroy_pd(pdn);
            }
            // This one is in use.
            let _busy = node.ctx.destroy_pd(node.pdn);
        }
    })
}

/// Contexts that have as many doorbell pages as they get, all of them the same page.
struct ManyPages {
    node: Node,
    page: Pages,
    contexts: Vec<u32>,
    most: usize,
}

impl Strike for ManyPages {
    fn strike(&mut self) {
        let add = Put::new().u64(self.page.gpa(0)).done(8);
        if self.contexts.is_empty() {
            for _ in 0..self.most {
                let made = self.node.ctx.command(cmd::CONTEXT_CREATE, &add, 8);
                let Ok(made) = made else { break };
                let ctx = made.u32_at(0);
                while self.node.guest.command(cmd::DB_PAGE_ADD, ctx, &add, 8).is_ok() {}
                self.contexts.push(ctx);
            }
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }

    fn rest(&mut self) {
        for ctx in self.contexts.drain(..) {
            let _gone = self.node.guest.command(cmd::CONTEXT_DESTROY, ctx, &[], 0);
        }
    }
}

fn pages(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(16));
    let page = node.guest.ram().alloc(1);
    page.view(0, page.len()).fill(0, page.len(), 0);
    Box::new(ManyPages { node, page, contexts: Vec::new(), most: ground.sized(1023, 250) })
}

fn small() -> QpSpec {
    QpSpec { sq: 2, rq: 2, send_sge: 1, recv_sge: 1, inline: 0, ..QpSpec::new(qpt::RC) }
}

fn context(ground: &Ground<'_>) -> Box<dyn Strike> {
    let (node, place) = (ground.villain(with_ram(48)), ground.places[0].clone());
    let [cqs, mrs, qps] = ground.sized([16_000, 4000, 500], [800, 300, 60]);
    Box::new(move || {
        let Ok(inner) = place.another(&node, with_ram(48)) else { return };
        let page = inner.guest.ram().alloc(1);
        for _ in 0..cqs {
            let _refused = blind_cq(&inner, page.gpa(0));
        }
        regions(&inner, page.gpa(0), mrs);
        let (scq, rcq) = (inner.cq(16), inner.cq(16));
        for _ in 0..qps {
            if let Ok(qp) = Qp::create(&inner.ctx, inner.pdn, &scq, &rcq, &small()) {
                let _state = qp.connect((inner.gid, qp.qpn), &Path::default());
            }
        }
        let _gone = place.leave(&inner);
        take_events(&node);
    })
}

fn resets(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(16));
    let page = node.guest.ram().alloc(1);
    let cqs = ground.sized(8000, 500);
    let mut mine = node;
    Box::new(move || {
        for _ in 0..cqs {
            let _refused = blind_cq(&mine, page.gpa(0));
        }
        let _reset = mine.guest.reset();
        let Node { name, socket, guest, gid, .. } = mine.clone();
        mine = Node::start(name, socket, guest, gid);
    })
}

fn qp_churn(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(16));
    let (scq, rcq) = (node.cq(64), node.cq(64));
    Box::new(move || {
        let Ok(qp) = Qp::create(&node.ctx, node.pdn, &scq, &rcq, &rc(16, 1)) else { return };
        let _state = qp.connect((node.gid, qp.qpn), &Path::default());
        let _gone = qp.destroy();
    })
}

fn mr_churn(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(48));
    let page = node.guest.ram().alloc(1);
    regions(&node, page.gpa(0), ground.sized(30_000, 1000));
    let pages = node.guest.ram().alloc_scattered(4096);
    // A process's memory is contiguous as it names it.
    let list = match ground.places[0].door {
        Door::Monitor => PageList::tree(node.guest.ram(), pages.gpas(), 0, 12, 2),
        Door::Process => PageList::contiguous(pages.gpa(0), 4096, 0, 12),
    };
    Box::new(move || {
        let _held = (&page, &pages);
        let made = node.ctx.mr_reg(node.pdn, access::ALL, (0, 4096 << 12), &list);
        if let Ok((lkey, _)) = made {
            let _gone = node.ctx.dereg(lkey);
        }
    })
}

fn context_churn(ground: &Ground<'_>) -> Box<dyn Strike> {
    let (node, place) = (ground.villain(with_ram(16)), ground.places[0].clone());
    Box::new(move || {
        if let Ok(inner) = place.another(&node, with_ram(8)) {
            let _gone = place.leave(&inner);
        }
    })
}

fn cq_churn(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(16));
    let page = node.guest.ram().alloc(1);
    Box::new(move || {
        if let Ok(cqn) = blind_cq(&node, page.gpa(0)) {
            let _gone = node.ctx.object(cmd::CQ_DESTROY, cqn);
        }
    })
}
