//! What programs ask of the connection manager, carried out.
//!
//! A command names identifiers of its own session only; each is a bounded amount of work. What must
//! be true of an identifier, and what a queue pair becomes, is as in the kernel (cma.c, cm.c in
//! drivers/infiniband/core), since librdmacm is made for that.

use std::net::SocketAddr;

use super::id::{Event, Id, Kind, Said, State, UDP_QKEY, Way};
use super::layout::{Attributes, Command, Param, Reply, Route, socket_address};
use super::machine::{Asker, Machine};
use super::ports::{gid_of, mix};
use crate::cm::message::{Ends, Message, Offer, reason};
use crate::link::{MULTICAST_QPN, is_multicast};
use crate::nic::{Nanos, Status};

/// Groups of an identifier.
const GROUPS: usize = 16;
/// The largest backlog, and that of who names none (drivers/infiniband/core/ucma.c).
const BACKLOG: u32 = 1024;
/// Events that a program need not take before it goes on, beside four for each identifier.
const EVENTS: usize = 64;
/// Path MTU: 4096 bytes (IBTA 9.2, the code of it).
const MTU: u8 = 5;
/// `enum ib_qp_attr_mask`.
mod mask {
    pub(super) const STATE: u32 = 1;
    pub(super) const ACCESS: u32 = 1 << 3;
    pub(super) const PKEY_INDEX: u32 = 1 << 4;
    pub(super) const PORT: u32 = 1 << 5;
    pub(super) const QKEY: u32 = 1 << 6;
    pub(super) const AV: u32 = 1 << 7;
    pub(super) const PATH_MTU: u32 = 1 << 8;
    pub(super) const TIMEOUT: u32 = 1 << 9;
    pub(super) const RETRY: u32 = 1 << 10;
    pub(super) const RNR_RETRY: u32 = 1 << 11;
    pub(super) const RQ_PSN: u32 = 1 << 12;
    pub(super) const RD_ATOMIC: u32 = 1 << 13;
    pub(super) const MIN_RNR: u32 = 1 << 15;
    pub(super) const SQ_PSN: u32 = 1 << 16;
    pub(super) const DEST_RD_ATOMIC: u32 = 1 << 17;
    pub(super) const DEST_QPN: u32 = 1 << 20;
}
/// Local ACK timeout of connections whose program says nothing: 4.096 us << 18, about a second.
const ACK_TIMEOUT: u8 = 18;
/// `IBV_EVENT_COMM_EST`.
const COMM_EST: u32 = 4;

impl Machine {
    /// Carries a command out. `reached`: whether the address that a RESOLVE names is in the network
    /// now.
    pub(super) fn command(
        &mut self,
        asker: Asker,
        command: Command,
        (reached, now): (bool, Nanos),
    ) -> Result<Reply, Status> {
        let channel = self.channel(asker)?;
        let full = channel.events.len() > EVENTS + 4 * channel.ids as usize;
        let makes_event = matches!(
            command,
            Command::Resolve { .. } | Command::Route { .. } | Command::Join { .. }
        );
        if full && makes_event {
            return Err(Status::NOMEM);
        }
        match command {
            Command::Create { uid, space } => {
                let number = self.create(asker.channel, space)?;
                self.id(asker, number)?.uid = uid;
                return Ok(Reply::Number(number));
            }
            Command::Destroy { id } => {
                self.id(asker, id)?;
                let (reported, withdrawn) = self.destroy(id, now);
                return Ok(Reply::Counts(reported, withdrawn));
            }
            Command::Bind { id, address } => {
                let it = self.id(asker, id)?;
                if it.state != State::Idle || it.own.is_some() {
                    return Err(Status::INVAL);
                }
                self.bind(id, address)?;
            }
            Command::Resolve { id, source, dest } => {
                self.id(asker, id)?;
                self.resolve(id, source, dest, reached)?;
            }
            Command::Route { id } => {
                let it = self.id(asker, id)?;
                if it.state != State::Resolved {
                    return Err(Status::INVAL);
                }
                it.state = State::Routed;
                self.happened(id, Kind::RouteResolved, 0, Said::Nothing);
            }
            Command::Query { id } => return Ok(Reply::Route(Box::new(self.query(asker, id)?))),
            Command::Listen { id, backlog } => self.listen(asker, id, backlog)?,
            Command::QpAttr { id, state } => {
                return Ok(Reply::Attributes(Box::new(self.attributes(asker, id, state)?)));
            }
            Command::GetEvent => return self.next_event(asker),
            Command::SetOption { id, level, name, value } => {
                self.set_option(asker, id, (level, name), &value)?;
            }
            Command::Join { id, uid, address } => return self.join(asker, (id, uid), address),
            Command::Leave { id: group } => {
                let id = *self.groups.get(&group).ok_or(Status::NOENT)?;
                let it = self.id(asker, id)?;
                let reported = it.groups.remove(&group).unwrap_or(0);
                let channel = it.channel.unwrap_or(asker.channel);
                self.groups.remove(&group);
                let (_, tokens) = self.withdraw((channel, id), |event| event.group == Some(group));
                return Ok(Reply::Counts(reported, tokens));
            }
            Command::Migrate { id } => return self.migrate(asker, id),
            other => self.of_connection(asker, other, now)?,
        }
        Ok(Reply::Done)
    }

    /// What is asked of a connection.
    fn of_connection(&mut self, asker: Asker, command: Command, now: Nanos) -> Result<(), Status> {
        match command {
            Command::Connect { id, param } => return self.connect(asker, id, param, now),
            Command::Accept { id, uid, param } => {
                return self.accept(asker, (id, uid), param, now);
            }
            Command::Reject { id, reason, private } => {
                self.id(asker, id)?;
                let reason = if reason == 0 { reason::CONSUMER } else { reason.into() };
                self.refuse(id, reason, private)?;
                let listener = self.id(asker, id)?.listener.take();
                self.answered(listener);
            }
            Command::Disconnect { id } => {
                self.id(asker, id)?;
                self.disconnect(id, now)?;
            }
            Command::Notify { id, event } => {
                let it = self.id(asker, id)?;
                if event == COMM_EST && it.state == State::Answered {
                    self.established(id);
                }
            }
            _ => return Err(Status::NOTSUPP),
        }
        Ok(())
    }

    pub(super) fn next_event(&mut self, asker: Asker) -> Result<Reply, Status> {
        // What a program waits for is behind no request of a stranger.
        let channel = self.channel(asker)?;
        let event = channel.events.pop_front().or_else(|| channel.requests.pop());
        let event = event.ok_or(Status::BUSY)?;
        self.taken(&event);
        if let Some(id) = self.ids.get_mut(&event.of) {
            id.reported = id.reported.wrapping_add(1);
            if let Some(group) = event.group.and_then(|group| id.groups.get_mut(&group)) {
                *group = group.wrapping_add(1);
            }
        }
        Ok(Reply::Event(Box::new(event)))
    }

    pub(super) fn resolve(
        &mut self,
        number: u32,
        source: Option<SocketAddr>,
        dest: SocketAddr,
        reached: bool,
    ) -> Result<(), Status> {
        let peer = self.peer_at(dest.ip()).ok_or(Status::UNREACH)?;
        let found = self.ids.get(&number).ok_or(Status::NOENT)?;
        if found.state != State::Idle {
            return Err(Status::INVAL);
        }
        if !reached && !is_multicast(&peer) {
            return Err(Status::UNREACH);
        }
        let bound = found.own.is_some_and(|own| !own.ip().is_unspecified());
        let local =
            if bound { found.local } else { self.source_for(&peer).ok_or(Status::UNREACH)? };
        if found.own.is_none() {
            let any = || socket_address(&local, 0);
            let at = source.filter(|source| !source.ip().is_unspecified()).unwrap_or_else(any);
            self.bind(number, at)?;
        }
        let Some(id) = self.ids.get_mut(&number) else { return Err(Status::NOENT) };
        if let Some(own) = id.own.as_mut().filter(|own| own.ip().is_unspecified()) {
            own.set_ip(socket_address(&local, 0).ip());
            id.local = local;
        }
        id.dest = Some(dest);
        id.peer = peer;
        id.mtu = MTU;
        id.state = State::Resolved;
        self.happened(number, Kind::AddressResolved, 0, Said::Nothing);
        Ok(())
    }

    pub(super) fn query(&mut self, asker: Asker, number: u32) -> Result<Route, Status> {
        let guid = u64::from_be_bytes(self.guid);
        let id = self.id(asker, number)?;
        let has_device = id.local != [0; 16];
        let has_path = has_device && id.peer != [0; 16];
        Ok(Route {
            guid: if has_device { guid } else { 0 },
            own: id.own,
            dest: id.dest,
            path: has_path.then_some((id.local, id.peer)),
            traffic_class: id.traffic_class,
        })
    }

    pub(super) fn listen(&mut self, asker: Asker, number: u32, backlog: u32) -> Result<(), Status> {
        let id = self.id(asker, number)?;
        if id.state != State::Idle {
            return Err(Status::INVAL);
        }
        let own = match id.own {
            Some(own) => own,
            None => {
                self.bind(number, (std::net::Ipv4Addr::UNSPECIFIED, 0).into())?;
                self.id(asker, number)?.own.ok_or(Status::INVAL)?
            }
        };
        if self.is_taken(number, own, true) {
            return Err(Status::EXIST);
        }
        let id = self.id(asker, number)?;
        id.state = State::Listening;
        id.backlog = if backlog == 0 { BACKLOG } else { backlog.min(BACKLOG) };
        Ok(())
    }

    pub(super) fn connect(
        &mut self,
        asker: Asker,
        number: u32,
        param: Param,
        now: Nanos,
    ) -> Result<(), Status> {
        let guid = self.guid;
        let id = self.id(asker, number)?;
        let (Some(own), Some(dest), State::Routed) = (id.own, id.dest, id.state) else {
            return Err(Status::INVAL);
        };
        let datagram = id.space.is_datagram();
        if param.private.len() > if datagram { 180 } else { 56 } {
            return Err(Status::INVAL);
        }
        let ends = Ends {
            source: id.local,
            source_port: own.port(),
            dest: id.peer,
            dest_port: dest.port(),
        };
        let space = id.space.number();
        let message = if datagram {
            Message::SidrReq { id: number, space, ends, private: param.private }
        } else {
            let psn = u32::try_from(mix(u64::from(number)) & 0xff_ffff).unwrap_or(0);
            self.claim(asker.session, number, param.offer.qpn)?;
            let id = self.id(asker, number)?;
            id.mine = Offer { psn, guid, ..param.offer };
            let (offer, mtu) = (id.mine, id.mtu);
            Message::Req { local: number, ends, offer, mtu, private: param.private }
        };
        self.id(asker, number)?.state = State::Asked;
        self.tell_again(number, message, now);
        Ok(())
    }

    pub(super) fn accept(
        &mut self,
        asker: Asker,
        (number, uid): (u32, u64),
        param: Option<Param>,
        now: Nanos,
    ) -> Result<(), Status> {
        let guid = self.guid;
        let id = self.id(asker, number)?;
        let remote = id.remote;
        match (id.state, param) {
            (State::Heard, _) => {
                id.state = State::Up;
                let rtu = Message::Rtu { local: number, remote };
                id.last = Some(rtu.clone());
                self.tell(number, &rtu);
            }
            (State::Wanted, Some(param)) if id.space.is_datagram() => {
                if param.private.len() > 136 {
                    return Err(Status::INVAL);
                }
                let qkey = if param.qkey == 0 { UDP_QKEY } else { param.qkey };
                let (qpn, private) = (param.offer.qpn, param.private);
                let message = Message::SidrRep { id: remote, status: 0, qpn, qkey, private };
                id.uid = uid;
                id.state = State::Over;
                id.last = Some(message.clone());
                let listener = id.listener.take();
                self.opened(number);
                self.answered(listener);
                self.tell(number, &message);
            }
            (State::Wanted, Some(param)) => {
                if param.private.len() > 196 {
                    return Err(Status::INVAL);
                }
                self.claim(asker.session, number, param.offer.qpn)?;
                let id = self.id(asker, number)?;
                let retry_count = id.mine.retry_count;
                let psn = id.mine.psn;
                let offer = Offer { psn, guid, ..param.offer };
                // A REP says no retry count: that of the REQ is both sides'.
                id.mine = Offer { retry_count, ..offer };
                id.uid = uid;
                id.state = State::Answered;
                let listener = id.listener.take();
                let message = Message::Rep { local: number, remote, offer, private: param.private };
                id.last = Some(message.clone());
                self.answered(listener);
                self.tell_again(number, message, now);
            }
            _ => return Err(Status::INVAL),
        }
        Ok(())
    }

    pub(super) fn way(&self, id: &Id) -> Way {
        let index = self.gids.iter().position(|gid| *gid == id.local).unwrap_or(0);
        let index = u8::try_from(index).unwrap_or(0);
        Way { dest: id.peer, index, traffic_class: id.traffic_class }
    }

    /// The way of an identifier to a peer or a group.
    pub(super) fn way_of(&self, number: u32) -> Way {
        self.ids.get(&number).map(|id| self.way(id)).unwrap_or_default()
    }

    /// What its queue pair becomes in a state (drivers/infiniband/core/cm.c, `ib_cm_init_qp_attr`).
    pub(super) fn attributes(
        &mut self,
        asker: Asker,
        number: u32,
        state: u32,
    ) -> Result<Attributes, Status> {
        self.id(asker, number)?;
        let way = self.way_of(number);
        let id = self.id(asker, number)?;
        let mut to = Attributes { state, ..Attributes::default() };
        let connected = matches!(
            id.state,
            State::Wanted | State::Answered | State::Heard | State::Up | State::Leaving
        );
        match state {
            1 if id.space.is_datagram() => {
                to.mask = mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::QKEY;
                to.qkey = UDP_QKEY;
            }
            1 => {
                to.mask = mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS;
                // Remote writes, and reads and atomics of who may have some.
                let reads = connected && id.mine.responder_resources > 0;
                to.access = if reads { 2 | 4 | 8 } else { u32::from(connected) << 1 };
            }
            2 if connected && !id.space.is_datagram() => {
                to.mask = mask::STATE | mask::AV | mask::PATH_MTU | mask::DEST_QPN | mask::RQ_PSN;
                to.mask |= mask::DEST_RD_ATOMIC | mask::MIN_RNR;
                to.mtu = id.mtu.clamp(1, MTU).into();
                (to.dest_qpn, to.rq_psn) = (id.theirs.qpn, id.mine.psn);
                to.max_dest_rd_atomic = id.mine.responder_resources;
                to.way = Some(way);
            }
            3 if connected && !id.space.is_datagram() => {
                to.mask = mask::STATE | mask::SQ_PSN | mask::TIMEOUT | mask::RETRY;
                to.mask |= mask::RNR_RETRY | mask::RD_ATOMIC;
                to.sq_psn = id.theirs.psn;
                to.max_rd_atomic = id.mine.initiator_depth;
                to.timeout = id.ack_timeout.unwrap_or(ACK_TIMEOUT);
                to.retry_count = id.mine.retry_count;
                to.rnr_retry = id.theirs.rnr_retry_count;
            }
            _ => return Err(Status::INVAL),
        }
        Ok(to)
    }

    pub(super) fn set_option(
        &mut self,
        asker: Asker,
        number: u32,
        option: (u32, u32),
        value: &[u8],
    ) -> Result<(), Status> {
        let id = self.id(asker, number)?;
        let word = value.iter().any(|byte| *byte != 0);
        match (option, value.len()) {
            // Type of service, one byte.
            ((0, 0), 1) => id.traffic_class = value.first().copied().unwrap_or(0),
            // While they mean something (cma.c, rdma_set_reuseaddr(), rdma_set_afonly()).
            ((0, 1), 4) if id.is_unbound() || word && id.state != State::Listening => {
                id.reuse = word;
            }
            ((0, 2), 4) if id.state == State::Idle => id.v6only = word,
            // The own queue pair's timeout of acknowledgements (cma.c, rdma_set_ack_timeout()).
            ((0, 3), 1) if !id.space.is_datagram() => id.ack_timeout = value.first().copied(),
            ((0, _), _) => return Err(Status::INVAL),
            _ => return Err(Status::NOTSUPP),
        }
        Ok(())
    }

    pub(super) fn join(
        &mut self,
        asker: Asker,
        (number, uid): (u32, u64),
        address: SocketAddr,
    ) -> Result<Reply, Status> {
        let id = self.id(asker, number)?;
        let group_gid = gid_of(address.ip());
        if id.local == [0; 16] || !is_multicast(&group_gid) {
            return Err(Status::INVAL);
        }
        if id.groups.len() >= GROUPS {
            return Err(Status::NOMEM);
        }
        let channel = id.channel.unwrap_or(asker.channel);
        let group = self.number();
        self.groups.insert(group, number);
        self.id(asker, number)?.groups.insert(group, 0);
        let way = Way { dest: group_gid, ..self.way_of(number) };
        let said = Said::Datagram(MULTICAST_QPN, UDP_QKEY, way, Vec::new());
        let (kind, of, group_of) = (Kind::MulticastJoin, number, Some(group));
        self.push(channel, Event { kind, status: 0, id: number, of, uid, group: group_of, said });
        Ok(Reply::Number(group))
    }

    /// Moves an identifier to another channel of its session, with its events; and who has asked
    /// it, whom its program does not know yet.
    pub(super) fn migrate(&mut self, asker: Asker, number: u32) -> Result<Reply, Status> {
        let reported = self.id(asker, number)?.reported;
        let before = self.put(number, asker.channel).ok_or(Status::NOENT)?;
        if before == asker.channel {
            return Ok(Reply::Counts(reported, 0));
        }
        let (events, tokens) = self.withdraw((before, number), |_| true);
        for event in events {
            if event.kind == Kind::Request {
                self.put(event.id, asker.channel);
            }
            self.push(asker.channel, event);
        }
        Ok(Reply::Counts(reported, tokens))
    }

    /// Puts an identifier into a channel; which it was in.
    fn put(&mut self, number: u32, channel: u32) -> Option<u32> {
        let before = self.ids.get_mut(&number)?.channel.as_mut()?;
        let before = std::mem::replace(before, channel);
        if let Some(channel) = self.channels.get_mut(&before) {
            channel.ids = channel.ids.saturating_sub(1);
        }
        if let Some(channel) = self.channels.get_mut(&channel) {
            channel.ids += 1;
        }
        Some(before)
    }
}
