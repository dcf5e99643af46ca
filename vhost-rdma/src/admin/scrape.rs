//! Who asks for metrics: how many at once, for how long, and at what cost to others.
//!
//! Whoever reaches the address may ask, and need not read the answer: [`crate::places::http`] has
//! few places, and each for seconds.
//!
//! ```text
//!  connection ─┐
//!  connection ─┼─ wanted ──> one task ──> one blocking thread: reads all counters
//!  connection <┴── text ────────┘
//! ```
//!
//! To read the counters is to ask every network's process. That is done once at a time, and all who
//! ask within a second are shown the same text. So commands of the admin API, which have the same
//! few blocking threads, find all of them but one, however many ask.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode, header};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, watch};

use crate::places::Places;
use crate::places::http::{self, FRESH};

/// Connections at one time. Nobody needs more than one or two.
const PLACES: usize = 8;

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// When the counters were read last, and the text; none: they could not be.
type Text = (Instant, Option<Bytes>);

/// What is shown, and that somebody wants it.
#[derive(Default)]
struct Page {
    wanted: Notify,
    text: watch::Sender<Option<Text>>,
}

fn fresh(text: Option<&Text>) -> Option<&Text> {
    text.filter(|(read, _)| read.elapsed() < FRESH)
}

impl Page {
    /// Reads the counters whenever somebody wants them.
    async fn renew(&self, registry: Arc<Registry>) {
        loop {
            self.wanted.notified().await;
            // Whoever asked while it was read has got it.
            if fresh(self.text.borrow().as_ref()).is_some() {
                continue;
            }
            let registry = Arc::clone(&registry);
            // It takes the daemon's lock, which a slow change may hold.
            let read = tokio::task::spawn_blocking(move || {
                let mut text = String::new();
                encode(&mut text, &registry).map(|()| text)
            });
            let text = match read.await {
                Ok(Ok(text)) => Some(Bytes::from(text)),
                _ => None,
            };
            self.text.send_replace(Some((Instant::now(), text)));
        }
    }

    async fn text(&self) -> Option<Bytes> {
        let mut next = self.text.subscribe();
        loop {
            if let Some((_, text)) = fresh(next.borrow_and_update().as_ref()) {
                return text.clone();
            }
            self.wanted.notify_one();
            next.changed().await.ok()?;
        }
    }

    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let plain = |status, text: &'static str| {
            let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
            *response.status_mut() = status;
            response
        };
        if request.uri().path() != "/metrics" {
            return plain(StatusCode::NOT_FOUND, "metrics are at /metrics\n");
        }
        if request.method() != Method::GET {
            return plain(StatusCode::METHOD_NOT_ALLOWED, "only GET\n");
        }
        let Some(text) = self.text().await else {
            return plain(StatusCode::INTERNAL_SERVER_ERROR, "metrics could not be read\n");
        };
        let mut response = Response::new(Full::new(text));
        let kind = header::HeaderValue::from_static(CONTENT_TYPE);
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        response
    }
}

/// Answers whoever comes; `accept` tells who that is, as far as callers can be told apart.
pub(super) async fn answer_all<S, K>(
    registry: Arc<Registry>,
    accept: impl AsyncFnMut() -> io::Result<(S, K)>,
) where
    S: AsyncRead + AsyncWrite + AsFd + Unpin + Send + 'static,
    K: Ord + Clone + Send + Sync + 'static,
{
    let page = Arc::new(Page::default());
    let own = Arc::clone(&page);
    tokio::spawn(async move { own.renew(registry).await });
    http::answer_all(Places::new(PLACES, PLACES), accept, move |request| {
        let page = Arc::clone(&page);
        async move { page.answer(&request).await }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::io::{Read as _, Write as _};
    use std::net::{SocketAddr, TcpStream};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use prometheus_client::collector::Collector;
    use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
    use prometheus_client::metrics::MetricType;
    use prometheus_client::metrics::gauge::ConstGauge;
    use tokio::runtime::Runtime;
    use tokio::time::sleep;

    use super::*;
    use crate::places::http::EXCHANGE;
    use crate::places::origin;

    /// How long it takes to read all counters.
    const READING: Duration = Duration::from_millis(400);
    const ASKERS: usize = 200;

    #[derive(Debug, Default)]
    struct Counts {
        readers: AtomicUsize,
        most: AtomicUsize,
        readings: AtomicUsize,
    }

    /// Counters that take their time, and are more than the kernel holds.
    #[derive(Debug)]
    struct Slow(Arc<Counts>);

    impl Collector for Slow {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            let readers = self.0.readers.fetch_add(1, Ordering::SeqCst) + 1;
            self.0.most.fetch_max(readers, Ordering::SeqCst);
            self.0.readings.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(READING);
            let mut metric = encoder.encode_descriptor("many", "Many", None, MetricType::Gauge)?;
            for n in 0..50_000 {
                ConstGauge::new(n).encode(metric.encode_family(&[("n", n.to_string())])?)?;
            }
            self.0.readers.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        }
    }

    /// A daemon's runtime with metrics that take their time, and where they are.
    fn daemon() -> (Runtime, SocketAddr, Arc<Counts>) {
        // As the admin API has one.
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().max_blocking_threads(16).build().unwrap();
        let counts = Arc::new(Counts::default());
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Slow(Arc::clone(&counts))));
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(answer_all(Arc::new(registry), async move || {
            let (stream, from) = listener.accept().await?;
            Ok((stream, origin(from)))
        }));
        (runtime, address, counts)
    }

    fn asks(address: SocketAddr) -> TcpStream {
        let mut stream = TcpStream::connect(address).unwrap();
        // It may be closed already.
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        stream
    }

    fn scrapes(address: SocketAddr) -> String {
        let mut text = String::new();
        asks(address).read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("# EOF\n"), "{text:.80}");
        text
    }

    #[test]
    fn who_asks_and_does_not_read_holds_nobody_up() {
        let (runtime, address, counts) = daemon();
        let client = std::thread::spawn(move || {
            let _askers: Vec<_> = (0..ASKERS).map(|_| asks(address)).collect();
            let _slow: Vec<_> = (0..ASKERS)
                .map(|_| {
                    let mut stream = TcpStream::connect(address).unwrap();
                    let _ = stream.write_all(b"GET /met");
                    stream
                })
                .collect();
            let begin = Instant::now();
            scrapes(address);
            begin.elapsed()
        });
        runtime.block_on(async {
            let mut longest = Duration::ZERO;
            while !client.is_finished() {
                // As a command of the admin API.
                let begin = Instant::now();
                tokio::task::spawn_blocking(|| ()).await.unwrap();
                longest = longest.max(begin.elapsed());
                sleep(Duration::from_millis(10)).await;
            }
            assert!(longest < Duration::from_secs(1), "a command waited for {longest:?}");
        });
        let waited = client.join().unwrap();
        assert!(waited < 10 * READING, "who reads has waited for {waited:?}");
        assert_eq!(counts.most.load(Ordering::SeqCst), 1, "at the same time");
    }

    #[test]
    fn counters_are_read_once_a_second_however_many_ask() {
        let (runtime, address, counts) = daemon();
        let begin = Instant::now();
        let client = std::thread::spawn(move || {
            let texts: Vec<_> = (0..30).map(|_| scrapes(address)).collect();
            assert!(texts.iter().all(|text| text.contains("many{n=\"49999\"} 49999\n")));
        });
        runtime.block_on(async {
            while !client.is_finished() {
                sleep(Duration::from_millis(10)).await;
            }
        });
        client.join().unwrap();
        let most = 1 + begin.elapsed().as_millis() / FRESH.as_millis();
        let readings = counts.readings.load(Ordering::SeqCst);
        assert!(readings > 0 && readings as u128 <= most, "{readings} in {:?}", begin.elapsed());
    }

    #[test]
    fn there_are_no_more_connections_than_places_and_none_for_long() {
        let (runtime, address, _) = daemon();
        let client = std::thread::spawn(move || {
            let mut streams: Vec<_> = (0..ASKERS)
                .map(|_| {
                    let mut stream = TcpStream::connect(address).unwrap();
                    let _ = stream.write_all(b"GET /met");
                    stream
                })
                .collect();
            let mut open = |patience: Duration| {
                let is_open = |stream: &mut TcpStream| {
                    stream.set_read_timeout(Some(patience)).unwrap();
                    stream.read(&mut [0]).is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock)
                };
                streams.iter_mut().filter_map(|s| is_open(s).then_some(())).count()
            };
            // Those that are to be closed are, by the time that the last is looked at.
            let (first, later) = (open(Duration::from_millis(100)), open(EXCHANGE));
            (first, later)
        });
        runtime.block_on(async {
            while !client.is_finished() {
                sleep(Duration::from_millis(10)).await;
            }
        });
        assert_eq!(client.join().unwrap(), (PLACES, 0));
    }
}
