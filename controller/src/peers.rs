//! The service that tells agents where the addresses of their networks are.
//!
//! Every replica serves: it needs its copy of the cluster and no lease. Nothing is queued for a
//! client. It is woken when something of its networks changed, and is told what is so *then*
//! ([`Board`]); while it does not read, nothing is made for it. What a slow client can hold is one
//! network's list on its way out, and only so many clients may be sent whole lists at a time.
//!
//! A client is the agent of the node that its certificate names, and hears of the networks of that
//! node and of no others.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore, mpsc, watch};
use tokio::time::Instant;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status};
use vhost_rdma_cluster_api::peers::v1::peers_server::{Peers, PeersServer};
use vhost_rdma_cluster_api::peers::v1::{FollowRequest, Held, PeerEntry, Update};

use crate::core::{Board, News, World};
use crate::metrics::{Form, Metrics};
use crate::tls::{self, Accepted, Caller, Identity};
use crate::trust::wall;

/// Entries of one message: some 60 KiB.
const ENTRIES: usize = 512;
/// Messages on their way to a client that it has not taken.
const UNREAD: usize = 2;
/// How long a client may leave a message unread.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a stream lasts: then the client asks again, and its certificate is looked at anew.
const LIFE: Duration = Duration::from_secs(1800);
const SPREAD: Duration = Duration::from_secs(10);
/// Clients that are sent whole lists at a time.
const WHOLE: usize = 32;
/// A client that is gone without a word is found out after twice this.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// Changes of so long are told together.
const TOGETHER: Duration = Duration::from_millis(20);
/// The most lists that a node can say that it holds, and the largest request.
const HELD_MAX: usize = 4096;
const REQUEST_MAX: usize = 512 << 10;

/// A client's place: a later one of the same node takes it.
#[derive(Debug)]
struct Client {
    number: u64,
    wake: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    board: Board,
    /// Which run of which replica counts; 0: the copy of the cluster is not complete.
    epoch: u64,
    clients: BTreeMap<String, Client>,
    number: u64,
}

/// The lists, and who follows them.
#[derive(Debug)]
pub struct Hub {
    state: Mutex<State>,
    whole: Arc<Semaphore>,
    metrics: Arc<Metrics>,
}

impl Hub {
    /// A hub that knows nothing yet.
    #[must_use]
    pub fn new(metrics: Arc<Metrics>) -> Self {
        let whole = Arc::new(Semaphore::new(WHOLE));
        Self { state: Mutex::default(), whole, metrics }
    }

    /// Nothing is half done when a thread ends while it has the state: each change is one call.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets everything: a copy of the cluster begins anew.
    pub fn reset(&self) {
        let mut state = self.state();
        state.board = Board::default();
        state.epoch = 0;
        state.clients.values().for_each(|client| client.wake.notify_one());
        state.clients.clear();
    }

    /// Takes over what has changed. The copy is complete.
    pub fn update(&self, world: &mut World) {
        let mut state = self.state();
        let State { board, clients, epoch, .. } = &mut *state;
        let concerned = board.update(world);
        for client in concerned.nodes.iter().filter_map(|node| clients.get(node)) {
            client.wake.notify_one();
        }
        for hosts in concerned.lists.iter().map(|uid| board.hosts(uid)) {
            wake(clients, hosts);
        }
        if *epoch == 0 {
            // Without randomness the time tells runs of one replica apart.
            *epoch = getrandom::u64().unwrap_or_else(|_| wall()).max(1);
        }
    }

    /// A node's agent connects; the run that it connects to.
    fn enter(&self, node: &str) -> Result<(u64, u64, Arc<Notify>), Status> {
        let mut state = self.state();
        if state.epoch == 0 {
            return Err(Status::unavailable("the copy of the cluster is not complete"));
        }
        state.number += 1;
        let client = Client { number: state.number, wake: Arc::new(Notify::new()) };
        let place = (state.epoch, client.number, Arc::clone(&client.wake));
        if let Some(before) = state.clients.insert(node.to_owned(), client) {
            before.wake.notify_one();
        }
        self.count(&state);
        Ok(place)
    }

    fn leave(&self, node: &str, number: u64) {
        let mut state = self.state();
        if state.clients.get(node).is_some_and(|client| client.number == number) {
            state.clients.remove(node);
        }
        self.count(&state);
    }

    fn count(&self, state: &State) {
        self.metrics.peers_clients.set(i64::try_from(state.clients.len()).unwrap_or(i64::MAX));
    }

    /// What a client holds of another run of a controller, and is as it is now: it is told so, and
    /// sent nothing.
    fn same(&self, follower: &Follower, held: &Held) -> Option<Update> {
        let state = self.state();
        if state.epoch != follower.epoch {
            return None;
        }
        let generation = state.board.same(&follower.node, &held.network_uid, &held.digest)?;
        let network = state.board.name(&held.network_uid)?.to_owned();
        let (network_uid, epoch) = (held.network_uid.clone(), follower.epoch);
        let same = true;
        Some(Update { network, network_uid, epoch, generation, same, ..Update::default() })
    }

    /// The first thing that a client is to be told; why its stream ends, if it does.
    fn next(&self, follower: &Follower) -> Result<Option<News>, Status> {
        let state = self.state();
        if state.epoch != follower.epoch {
            return Err(Status::unavailable("the controller begins anew: ask again"));
        }
        let mine = state.clients.get(&follower.node).map(|client| client.number);
        if mine != Some(follower.number) {
            return Err(Status::aborted("the node's agent has connected anew"));
        }
        let mut hosted = state.board.hosted(&follower.node);
        Ok(hosted
            .find_map(|uid| state.board.news(&follower.node, uid, follower.told.get(uid).copied())))
    }
}

/// Wakes the clients among these nodes; either may be many.
fn wake(clients: &BTreeMap<String, Client>, nodes: &BTreeSet<String>) {
    if nodes.len() < clients.len() {
        for client in nodes.iter().filter_map(|node| clients.get(node)) {
            client.wake.notify_one();
        }
    } else {
        for (_, client) in clients.iter().filter(|(node, _)| nodes.contains(*node)) {
            client.wake.notify_one();
        }
    }
}

/// One client's stream.
struct Follower {
    hub: Arc<Hub>,
    node: String,
    epoch: u64,
    number: u64,
    told: BTreeMap<String, u64>,
    out: mpsc::Sender<Result<Update, Status>>,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.hub.leave(&self.node, self.number);
    }
}

impl Follower {
    async fn run(mut self, wake: Arc<Notify>, of_others: Vec<Held>) {
        for held in of_others {
            let Some(update) = self.hub.same(&self, &held) else { continue };
            let (uid, generation) = (update.network_uid.clone(), update.generation);
            self.count("same");
            if self.send(update).await.is_err() {
                return;
            }
            self.told.insert(uid, generation);
        }
        // Clients that came together do not come again together.
        let end = Instant::now() + LIFE - SPREAD * u32::try_from(self.number % 64).unwrap_or(0);
        loop {
            if let Err(status) = self.tell_all().await {
                // It does not matter to a client that does not read why it is left.
                let _ = self.out.try_send(Err(status));
                return;
            }
            tokio::select! {
                () = wake.notified() => tokio::time::sleep(TOGETHER).await,
                () = self.out.closed() => return,
                () = tokio::time::sleep_until(end) => {
                    let _ = self.out.try_send(Err(Status::unavailable("ask again")));
                    return;
                }
            }
        }
    }

    async fn tell_all(&mut self) -> Result<(), Status> {
        while let Some(news) = self.hub.next(self)? {
            if !news.whole {
                self.tell(news).await?;
                continue;
            }
            drop(news);
            let whole = Arc::clone(&self.hub.whole);
            let place = whole.acquire_owned().await.map_err(|_| Status::unavailable("ends"))?;
            // It is made only now, when its turn has come.
            if let Some(news) = self.hub.next(self)? {
                self.tell(news).await?;
            }
            drop(place);
        }
        Ok(())
    }

    async fn tell(&mut self, news: News) -> Result<(), Status> {
        self.count(if news.whole { "whole" } else { "delta" });
        let (uid, generation) = (news.uid.clone(), news.generation);
        for update in updates(news, self.epoch) {
            self.send(update).await?;
        }
        self.told.insert(uid, generation);
        Ok(())
    }

    fn count(&self, form: &'static str) {
        self.hub.metrics.peers_updates.get_or_create(&Form { form }).inc();
    }

    async fn send(&self, update: Update) -> Result<(), Status> {
        match tokio::time::timeout(PATIENCE, self.out.send(Ok(update))).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Status::cancelled("the client is gone")),
            Err(_) => {
                self.hub.metrics.peers_slow.inc();
                Err(Status::deadline_exceeded("the client does not read"))
            }
        }
    }
}

/// The messages of what is to be told: at least one.
fn updates(news: News, epoch: u64) -> impl Iterator<Item = Update> {
    let messages = (news.add.len() + news.remove.len()).div_ceil(ENTRIES).max(1);
    let (mut add, mut remove) = (news.add.into_iter(), news.remove.into_iter());
    (0..messages).map(move |n| {
        let entries: Vec<PeerEntry> = add
            .by_ref()
            .take(ENTRIES)
            .map(|(cidr, entry)| PeerEntry {
                cidr: cidr.to_string(),
                through: entry.through.clone(),
                daemon: entry.daemon.clone(),
            })
            .collect();
        let left = ENTRIES - entries.len();
        Update {
            network: news.network.clone(),
            network_uid: news.uid.clone(),
            epoch,
            generation: news.generation,
            whole: news.whole,
            add: entries,
            remove: remove.by_ref().take(left).map(|cidr| cidr.to_string()).collect(),
            more: n + 1 < messages,
            same: false,
        }
    })
}

/// The service.
#[derive(Debug)]
pub struct Service {
    hub: Arc<Hub>,
}

impl Service {
    /// The service, to be given to a server.
    #[must_use]
    pub fn server(hub: Arc<Hub>) -> PeersServer<Self> {
        PeersServer::new(Self { hub }).max_decoding_message_size(REQUEST_MAX)
    }
}

#[tonic::async_trait]
impl Peers for Service {
    type FollowStream = ReceiverStream<Result<Update, Status>>;

    async fn follow(
        &self,
        request: Request<FollowRequest>,
    ) -> Result<Response<Self::FollowStream>, Status> {
        let caller = request.extensions().get::<Caller>().and_then(|caller| caller.node.clone());
        let node = caller.ok_or_else(|| Status::unauthenticated("no certificate of a node"))?;
        let asked = request.into_inner();
        if asked.node != node {
            let message = format!("the certificate is that of {node:?}");
            return Err(Status::permission_denied(message));
        }
        if asked.held.len() > HELD_MAX {
            return Err(Status::invalid_argument(format!("more than {HELD_MAX} lists are held")));
        }
        let (epoch, number, wake) = self.hub.enter(&node)?;
        let (held, of_others): (Vec<_>, Vec<_>) =
            asked.held.into_iter().partition(|held| held.epoch == epoch);
        let told = held.into_iter().map(|held| (held.network_uid, held.generation)).collect();
        let (out, stream) = mpsc::channel(UNREAD);
        let hub = Arc::clone(&self.hub);
        tokio::spawn(Follower { hub, node, epoch, number, told, out }.run(wake, of_others));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// A connection that knows who is at its other end.
#[derive(Debug)]
struct Io(Accepted);

impl Connected for Io {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.0.caller.clone()
    }
}

impl AsyncRead for Io {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.0.place.poll_lost(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.0.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Io {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.stream).poll_shutdown(context)
    }
}

/// Serves at `listener`, as the identity of the moment lets clients in.
pub async fn serve(
    listener: TcpListener,
    identity: watch::Receiver<Option<Identity>>,
    hub: Arc<Hub>,
) {
    let (accepted, incoming) = mpsc::channel(64);
    let nodes: tls::Choice = |identity| identity.nodes.clone();
    tokio::spawn(tls::accept(listener, identity, (nodes, tls::WHOLE), accepted));
    let incoming = ReceiverStream::new(incoming).map(|accepted| Ok::<_, io::Error>(Io(accepted)));
    let served = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .max_concurrent_streams(4)
        .add_service(Service::server(hub))
        .serve_with_incoming(incoming)
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the service of peers ended");
    }
}

#[cfg(test)]
#[path = "peers_tests.rs"]
mod tests;
