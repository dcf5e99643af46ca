//! The way out: one connection for each daemon that there is something to say to, made when there
//! is.
//!
//! What finds its NIC's share of the queue taken, or the other daemon away, is dropped: the
//! connection manager sends again, and a daemon that hangs costs a share of each NIC that speaks to
//! it and nobody's time. The share is of this queue alone, so a NIC that waits for one daemon still
//! speaks to the others.
//!
//! There are as many connections as the operator chose, at most. A guest chooses whom it has
//! something to say to, so where there are too many the oldest of the NIC that caused the most is
//! closed (`places`), and what waited for it is lost: a NIC that speaks to a thousand daemons takes
//! nobody's connection to the one it needs.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::Known;
use super::frame::Frame;
use crate::node::host_and_port;
use crate::places::Places;
use crate::rnic::{ForwardQuota, QuotaPermit};

/// How long each step of setting a connection up, and each message, may take.
const STEP: Duration = Duration::from_secs(5);
/// A connection that carries nothing for so long ends.
const IDLE: Duration = Duration::from_secs(60);
/// Between two attempts to connect.
const RETRY: Duration = Duration::from_millis(500);

/// Links that have ended are looked for when there are so many, or twice as many as there were.
const SWEEP: usize = 64;

/// A message on its way.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// The daemon that it is for.
    pub(super) daemon: Arc<str>,
    pub(super) frame: Frame,
    /// Its NIC's place in the queue from the workers.
    pub(super) permit: QuotaPermit,
}

/// A message that waits for one daemon, and its NIC's place there.
type Waiting = (Frame, QuotaPermit);

/// The end of a link that is filled.
struct Way {
    queue: UnboundedSender<Waiting>,
    quotas: ForwardQuota,
}

impl Way {
    fn new() -> (Self, UnboundedReceiver<Waiting>) {
        let (queue, receiver) = unbounded_channel();
        (Self { queue, quotas: ForwardQuota::default() }, receiver)
    }

    /// False if the message is lost.
    fn put(&mut self, frame: Frame, permit: &QuotaPermit) -> bool {
        let Some(permit) = self.quotas.take(permit) else { return false };
        self.queue.send((frame, permit)).is_ok()
    }
}

/// Hands messages to the connections of their daemons, until nobody sends any more.
pub(super) async fn dispatch(
    mut queue: UnboundedReceiver<Outgoing>,
    identity: watch::Receiver<Known>,
    daemons: usize,
) {
    let places = Places::new(daemons, daemons);
    let mut links: BTreeMap<Arc<str>, Way> = BTreeMap::new();
    let mut sweep = SWEEP;
    while let Some(Outgoing { daemon, frame, permit }) = queue.recv().await {
        // Only names of peer entries come here; links that are no longer used end by themselves.
        if links.get(&daemon).is_some_and(|way| way.queue.is_closed()) {
            links.remove(&daemon);
        }
        if links.len() >= sweep {
            links.retain(|_, way| !way.queue.is_closed());
            sweep = SWEEP.max(2 * links.len());
        }
        let way = links.entry(daemon.clone()).or_insert_with(|| {
            let (way, queue) = Way::new();
            let link = Link { daemon, identity: identity.clone(), queue };
            let mut place = places.take(&permit.whose());
            tokio::spawn(async move {
                tokio::select! {
                    () = link.run() => {}
                    () = place.lost() => tracing::debug!("too many connections to other daemons"),
                }
            });
            way
        });
        if !way.put(frame, &permit) {
            tracing::debug!(
                "a management datagram for another daemon is lost: its NIC's share is taken"
            );
        }
    }
}

struct Link {
    daemon: Arc<str>,
    identity: watch::Receiver<Known>,
    queue: UnboundedReceiver<Waiting>,
}

impl Link {
    async fn run(mut self) {
        let mut told = false;
        // The first message is there already; a link without any for a while ends.
        while let Ok(Some(first)) = timeout(IDLE, self.queue.recv()).await {
            let ended = match self.connect().await {
                Ok(stream) => {
                    told = false;
                    self.serve(stream, first).await
                }
                Err(error) => Err(error),
            };
            if let Err(error) = ended {
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!(
                        daemon = %self.daemon,
                        %error,
                        "another daemon cannot be reached"
                    );
                }
                sleep(RETRY).await;
            }
        }
    }

    async fn connect(&mut self) -> io::Result<TlsStream<TcpStream>> {
        let wrong = || io::Error::from(io::ErrorKind::InvalidInput);
        let (host, port) = host_and_port(&self.daemon).ok_or_else(wrong)?;
        let name = ServerName::try_from(host.to_owned()).map_err(|_| wrong())?;
        let config = self.identity.borrow_and_update().as_ref().map(|known| known.client.clone());
        let config = config.ok_or_else(|| io::Error::other("there is no certificate yet"))?;
        let stream = timeout(STEP, TcpStream::connect((host, port))).await??;
        stream.set_nodelay(true)?;
        let connector = TlsConnector::from(config);
        timeout(STEP, connector.connect(name, stream)).await?
    }

    /// Sends messages until there are none for a while, or the connection ends.
    async fn serve(&mut self, stream: TlsStream<TcpStream>, first: Waiting) -> io::Result<()> {
        let (mut read, mut write) = tokio::io::split(stream);
        let mut next = Some(first);
        let mut byte = [0];
        loop {
            // Its place is given back once it is sent.
            if let Some((frame, _place)) = next.take()
                && let Some(bytes) = frame.encode()
            {
                timeout(STEP, write.write_all(&bytes)).await??;
                timeout(STEP, write.flush()).await??;
            }
            tokio::select! {
                // It never says anything; this tells that it is gone, or has refused our
                // certificate.
                ended = read.read(&mut byte) => {
                    return match ended? {
                        0 => Err(io::ErrorKind::UnexpectedEof.into()),
                        _ => Err(io::ErrorKind::InvalidData.into()),
                    };
                }
                // Who we are, or whom we believe, has changed: the next message goes over a new
                // connection.
                _ = self.identity.changed() => return timeout(STEP, write.shutdown()).await?,
                frame = timeout(IDLE, self.queue.recv()) => match frame {
                    Ok(Some(waiting)) => next = Some(waiting),
                    Ok(None) | Err(_) => {
                        return timeout(STEP, write.shutdown()).await?;
                    }
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::{MAD_LEN, Mad};
    use crate::rnic::NicQuota;

    fn frame(first: u8) -> Frame {
        let mad = Mad {
            source: [first; 16],
            dest: [9; 16],
            traffic_class: 0,
            sl: 0,
            bytes: [0; MAD_LEN],
        };
        Frame { network: "net".to_owned(), mad }
    }

    #[test]
    fn a_flood_for_a_daemon_takes_no_other_nics_place_there() {
        let (mut way, mut waiting) = Way::new();
        let flooders: [NicQuota; 3] = std::array::from_fn(|_| NicQuota::default());
        let bystander = NicQuota::default();
        for _ in 0..1000 {
            for quota in &flooders {
                let permit = quota.take().unwrap();
                way.put(frame(1), &permit);
            }
        }
        assert!(way.put(frame(2), &bystander.take().unwrap()), "there is room for who floods not");
        let ahead = std::iter::from_fn(|| waiting.try_recv().ok()).position(|(f, _)| f == frame(2));
        assert_eq!(ahead, Some(3 * crate::rnic::PER_NIC), "it waits for a share of each, no more");
    }
}
