//! HTTP for strangers: a connection is for one question, and has seconds for it.
//!
//! Whoever reaches the address may ask, and need not read the answer. So there are few places, and
//! who comes always finds one: the oldest connection of whoever has the most goes. What a
//! connection leaves unread goes with it, also what the kernel has of it.
//!
//! Not guaranteed is an answer for somebody at an address where others flood: newer connections in
//! the time of it close the one that waits, which comes again at its next interval.

use std::convert::Infallible;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt::{set_socket_linger, set_socket_send_buffer_size};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::time::sleep;

use crate::{Place, Places, origin};

/// How long one may take: question, answer, and all of that read.
pub const EXCHANGE: Duration = Duration::from_secs(10);
/// How long a text is shown to whoever asks.
pub const FRESH: Duration = Duration::from_secs(1);
/// Bytes of an answer that the kernel holds for who has not read them.
const UNREAD: usize = 64 << 10;
/// After an error of accept, mostly because of no free descriptors.
const PAUSE: Duration = Duration::from_millis(200);

/// A text that is made at most once in [`FRESH`], however many ask.
#[derive(Debug, Default)]
pub struct Text(Mutex<Option<(Instant, Bytes)>>);

impl Text {
    /// The text, made anew if it is old.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn get<E>(&self, make: impl FnOnce() -> Result<String, E>) -> Result<Bytes, E> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, text)) = held.as_ref().filter(|(made, _)| made.elapsed() < FRESH) {
            return Ok(text.clone());
        }
        let text = Bytes::from(make()?);
        *held = Some((Instant::now(), text.clone()));
        Ok(text)
    }
}

/// Answers everyone at a TCP listener, without waiting for anything.
pub async fn serve(
    listener: TcpListener,
    room: usize,
    respond: impl Fn(&Request<Incoming>) -> Response<Full<Bytes>> + Clone + Send + Sync + 'static,
) {
    // Who has several addresses has no more places than there are.
    let places = Places::new(room, room);
    let respond = move |request: Request<Incoming>| std::future::ready(respond(&request));
    loop {
        match listener.accept().await {
            Ok((stream, from)) => admit(&places, stream, &origin(from), &respond).await,
            Err(error) => pause(&error).await,
        }
    }
}

/// Answers whoever comes; `accept` tells who that is, as far as callers can be told apart.
pub async fn answer_all<S, K, F>(
    places: Arc<Places<K>>,
    mut accept: impl AsyncFnMut() -> io::Result<(S, K)>,
    respond: impl Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
) where
    S: AsyncRead + AsyncWrite + AsFd + Unpin + Send + 'static,
    K: Ord + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    loop {
        match accept().await {
            Ok((stream, who)) => admit(&places, stream, &who, &respond).await,
            Err(error) => pause(&error).await,
        }
    }
}

/// Gives a connection a place, and answers it there.
async fn admit<S, K, F>(
    places: &Arc<Places<K>>,
    stream: S,
    who: &K,
    respond: &(impl Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static),
) where
    S: AsyncRead + AsyncWrite + AsFd + Unpin + Send + 'static,
    K: Ord + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let place = places.take(who);
    tokio::spawn(answer(stream, place, respond.clone()));
    // The connection whose place was taken closes before the next is accepted, so there are never
    // more than there are places.
    tokio::task::yield_now().await;
}

/// Out of descriptors, most likely: waits, so that a loop does not burn a core.
async fn pause(error: &io::Error) {
    tracing::warn!(%error, "cannot accept an HTTP connection");
    sleep(PAUSE).await;
}

/// Answers one connection.
async fn answer<S, K, F>(stream: S, mut place: Place<K>, respond: impl Fn(Request<Incoming>) -> F)
where
    S: AsyncRead + AsyncWrite + AsFd + Unpin,
    K: Ord + Clone,
    F: Future<Output = Response<Full<Bytes>>>,
{
    // With more, it is the kernel that holds more; nothing else depends on it.
    let _ = set_socket_send_buffer_size(&stream, UNREAD);
    let service = service_fn(|request: Request<Incoming>| {
        let response = respond(request);
        async move { Ok::<_, Infallible>(response.await) }
    });
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).keep_alive(false);
    let mut exchange = server.serve_connection(TokioIo::new(stream), service);
    let why = tokio::select! {
        ended = &mut exchange => return told(ended),
        () = place.lost() => "too many of them",
        () = sleep(EXCHANGE) => "it took too long",
    };
    tracing::debug!(why, "an HTTP connection is closed");
    let stream = exchange.into_parts().io.into_inner();
    let _ = set_socket_linger(&stream, Some(Duration::ZERO));
}

fn told(ended: hyper::Result<()>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "an HTTP connection ended badly");
    }
}
