//! What a guest has rung for: doorbell pages are looked at, and each post goes to its queue.

use super::budget::{Budget, cost};
use super::doorbell::{Owner, Post};
use super::nic::{Nic, NicState, Provider};
use super::parts::{ReceiveSide, SendSide};
use super::qp::State;

impl<P: Provider> Nic<P> {
    /// See [`super::on_shard::OnShard::scan`].
    #[inline]
    pub(crate) fn scan(&mut self, posts: &mut Vec<Post>, brief: bool) -> bool {
        if self.life != NicState::Ready {
            return false;
        }
        posts.clear();
        let looked = self.contexts.collect(posts, brief);
        self.meter.charge_each(cost::DOORBELL_PAGE, looked);
        self.take_posts(posts)
    }

    /// See [`super::on_shard::OnShard::look_at_context`].
    pub(crate) fn look_at_context(
        &mut self,
        ctx: u32,
        posts: &mut Vec<Post>,
        budget: &mut Budget,
    ) -> bool {
        if self.life != NicState::Ready {
            return false;
        }
        for number in 0..self.contexts.pages_of(ctx) {
            posts.clear();
            self.contexts.collect_of(ctx, number, posts);
            self.meter.charge(cost::DOORBELL_PAGE);
            self.take_posts(posts);
            if budget.is_over(&self.meter) {
                break;
            }
        }
        !self.run.is_empty()
    }

    fn take_posts(&mut self, posts: &[Post]) -> bool {
        self.meter.charge_each(cost::POST, posts.len());
        for post in posts {
            self.posted(*post);
        }
        !posts.is_empty()
    }

    /// Goes on with the last look before sleep, at every doorbell page: whether anything was rung,
    /// or `None` if there are pages left.
    pub(crate) fn look_on(&mut self, posts: &mut Vec<Post>, budget: &mut Budget) -> Option<bool> {
        if self.life != NicState::Ready {
            return Some(false);
        }
        loop {
            posts.clear();
            let rung = self.contexts.look_on(posts);
            self.meter.charge(cost::DOORBELL_PAGE);
            self.take_posts(posts);
            match rung {
                None => return Some(false),
                Some(true) => return Some(true),
                Some(false) if budget.is_over(&self.meter) => return None,
                Some(false) => {}
            }
        }
    }

    pub(crate) fn posted(&mut self, post: Post) {
        match post.owner {
            Owner::Send(qpn) => self.posted_send(qpn, post),
            Owner::Receive(qpn) => self.posted_receive(qpn, post),
            Owner::Shared(srqn) => {
                let Some(srq) = self.srqs.get_mut(srqn as usize) else { return };
                match srq.ring.posted(post.producer) {
                    Ok(()) => {
                        if self.backing.shared_posted(srq) {
                            P::run_shared(self, srqn);
                        }
                    }
                    Err(_) => self.srq_failed(srqn),
                }
            }
        }
    }

    fn posted_send(&mut self, qpn: u32, post: Post) {
        let Some(qp) = self.qps.get_mut(&qpn) else {
            return P::posted_elsewhere(self, post.owner, post.producer);
        };
        if qp.state == State::Reset {
            let (ctx, [doorbell, _]) = (qp.ctx, qp.doorbells);
            return self.contexts.reset_doorbell(ctx, doorbell);
        }
        let Some(send) = &mut qp.send else { return };
        match send.queue_mut().posted(post.producer) {
            Ok(()) => self.schedule(qpn),
            Err(_) => self.qp_fatal(qpn),
        }
    }

    fn posted_receive(&mut self, qpn: u32, post: Post) {
        let Some(qp) = self.qps.get_mut(&qpn) else {
            return P::posted_elsewhere(self, post.owner, post.producer);
        };
        if qp.state == State::Reset {
            let (ctx, [_, doorbell]) = (qp.ctx, qp.doorbells);
            return self.contexts.reset_doorbell(ctx, doorbell);
        }
        let Some(receive) = &mut qp.receive else { return };
        match receive.ring_mut().posted(post.producer) {
            Ok(()) => {
                let more = self.backing.receive_posted(qp);
                if qp.state == State::Err {
                    self.schedule(qpn);
                } else if more {
                    P::run_receives(self, qpn);
                }
            }
            Err(_) => self.qp_fatal(qpn),
        }
    }
}
