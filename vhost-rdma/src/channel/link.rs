//! The way out: one connection for each daemon that there is something to say to, made when there is.
//!
//! What finds the queue full, or the other daemon away, is dropped: the connection manager sends again, and a daemon that hangs costs
//! neither memory nor anybody's time.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::frame::Frame;
use crate::node::host_and_port;

/// Messages that wait for one daemon.
const ROOM: usize = 64;
/// How long each step of setting a connection up, and each message, may take.
const STEP: Duration = Duration::from_secs(5);
/// A connection that carries nothing for so long ends.
const IDLE: Duration = Duration::from_secs(60);
/// Between two attempts to connect.
const RETRY: Duration = Duration::from_millis(500);

/// A message and the daemon that it is for.
pub(super) type Outgoing = (Arc<str>, Frame);

/// Hands messages to the connections of their daemons, until nobody sends any more.
pub(super) async fn dispatch(mut queue: Receiver<Outgoing>, config: Arc<ClientConfig>) {
    let mut links: BTreeMap<Arc<str>, Sender<Frame>> = BTreeMap::new();
    while let Some((daemon, frame)) = queue.recv().await {
        // Only names of peer entries come here; those that are no longer used end by themselves.
        links.retain(|_, link| !link.is_closed());
        let link = links.entry(daemon.clone()).or_insert_with(|| {
            let (sender, receiver) = channel(ROOM);
            let link = Link { daemon, config: config.clone(), queue: receiver };
            tokio::spawn(link.run());
            sender
        });
        if link.try_send(frame).is_err() {
            tracing::debug!("a management datagram for another daemon is lost: its queue is full");
        }
    }
}

struct Link {
    daemon: Arc<str>,
    config: Arc<ClientConfig>,
    queue: Receiver<Frame>,
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
                    tracing::warn!(daemon = %self.daemon, %error, "another daemon cannot be reached");
                }
                sleep(RETRY).await;
            }
        }
    }

    async fn connect(&self) -> io::Result<TlsStream<TcpStream>> {
        let wrong = || io::Error::from(io::ErrorKind::InvalidInput);
        let (host, port) = host_and_port(&self.daemon).ok_or_else(wrong)?;
        let name = ServerName::try_from(host.to_owned()).map_err(|_| wrong())?;
        let stream = timeout(STEP, TcpStream::connect((host, port))).await??;
        stream.set_nodelay(true)?;
        let connector = TlsConnector::from(self.config.clone());
        timeout(STEP, connector.connect(name, stream)).await?
    }

    /// Sends messages until there are none for a while, or the connection ends.
    async fn serve(&mut self, stream: TlsStream<TcpStream>, first: Frame) -> io::Result<()> {
        let (mut read, mut write) = tokio::io::split(stream);
        let mut next = Some(first);
        let mut byte = [0];
        loop {
            if let Some(bytes) = next.take().and_then(|frame| frame.encode()) {
                timeout(STEP, write.write_all(&bytes)).await??;
                timeout(STEP, write.flush()).await??;
            }
            tokio::select! {
                // It never says anything; this tells that it is gone, or has refused our certificate.
                ended = read.read(&mut byte) => {
                    return match ended? {
                        0 => Err(io::ErrorKind::UnexpectedEof.into()),
                        _ => Err(io::ErrorKind::InvalidData.into()),
                    };
                }
                frame = timeout(IDLE, self.queue.recv()) => match frame {
                    Ok(Some(frame)) => next = Some(frame),
                    Ok(None) | Err(_) => {
                        return timeout(STEP, write.shutdown()).await?;
                    }
                },
            }
        }
    }
}
