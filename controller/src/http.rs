//! Health and metrics over HTTP.
//!
//! `/healthz` fails when the engine does not turn: a restart is then the cure. `/readyz` fails
//! until the copy of the cluster is complete. A replica that does not lead is as healthy as one
//! that does.
//!
//! Any pod reaches the port; what keeps it for the kubelet is [`vhost_rdma_places::http`].

use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::{Method, Request, Response, StatusCode, header};
use tokio::net::TcpListener;
use tokio::time::Instant;
use vhost_rdma_places::http::{self, Text};

use crate::metrics::Metrics;

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// An engine that has not turned for so long does not turn any more.
const STALLED: Duration = Duration::from_secs(30);
/// Connections at a time.
const CONNECTIONS: usize = 64;

/// Answers everyone at `listener`.
pub async fn serve(listener: TcpListener, metrics: Arc<Metrics>, started: Instant) {
    let text = Arc::new(Text::default());
    http::serve(listener, CONNECTIONS, move |request| {
        respond(request, &metrics, &text, started.elapsed())
    })
    .await;
}

fn respond<B>(
    request: &Request<B>,
    metrics: &Metrics,
    text: &Text,
    now: Duration,
) -> Response<Full<Bytes>> {
    let plain = |status: StatusCode, text: &'static str| {
        let mut response = Response::new(Full::new(Bytes::from(text)));
        *response.status_mut() = status;
        response
    };
    if request.method() != Method::GET {
        return plain(StatusCode::METHOD_NOT_ALLOWED, "only GET\n");
    }
    match request.uri().path() {
        "/healthz" if now.as_secs_f64() - metrics.turned.get() > STALLED.as_secs_f64() => {
            plain(StatusCode::SERVICE_UNAVAILABLE, "the engine does not turn\n")
        }
        "/readyz" if metrics.synced.get() == 0 => {
            plain(StatusCode::SERVICE_UNAVAILABLE, "the copy of the cluster is not complete\n")
        }
        "/healthz" | "/readyz" => plain(StatusCode::OK, "ok\n"),
        "/metrics" => {
            let made = text.get(|| {
                let mut text = String::new();
                prometheus_client::encoding::text::encode(&mut text, &metrics.registry())
                    .map(|()| text)
            });
            let Ok(text) = made else {
                return plain(StatusCode::INTERNAL_SERVER_ERROR, "cannot write the metrics\n");
            };
            let mut response = Response::new(Full::new(text));
            let kind = header::HeaderValue::from_static(CONTENT_TYPE);
            response.headers_mut().insert(header::CONTENT_TYPE, kind);
            response
        }
        _ => plain(StatusCode::NOT_FOUND, "there are /healthz, /readyz and /metrics\n"),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpSocket;

    use super::*;

    fn status(path: &str, metrics: &Metrics, now: u64) -> StatusCode {
        let request = Request::get(path).body(()).expect("a request");
        respond(&request, metrics, &Text::default(), Duration::from_secs(now)).status()
    }

    #[test]
    fn probes_say_what_they_should() {
        let metrics = Metrics::default();
        assert_eq!(status("/readyz", &metrics, 1), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(status("/healthz", &metrics, 1), StatusCode::OK);
        assert_eq!(status("/healthz", &metrics, 31), StatusCode::SERVICE_UNAVAILABLE);
        metrics.turned.set(30.0);
        metrics.synced.set(1);
        assert_eq!(status("/healthz", &metrics, 31), StatusCode::OK);
        assert_eq!(status("/readyz", &metrics, 31), StatusCode::OK);
        assert_eq!(status("/metrics", &metrics, 31), StatusCode::OK);
        assert_eq!(status("/", &metrics, 31), StatusCode::NOT_FOUND);
    }

    #[tokio::test]
    async fn strangers_who_say_nothing_and_who_ask_without_end_hold_no_probe_up() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(serve(listener, Arc::new(Metrics::default()), Instant::now()));
        let mut strangers = Vec::new();
        for text in ["", "GET /met", "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"].repeat(100) {
            let mut stream = tokio::net::TcpStream::connect(address).await.expect("a connection");
            let _ = stream.write_all(text.as_bytes()).await;
            strangers.push(stream);
        }
        let probe = async {
            let socket = TcpSocket::new_v4().expect("a socket");
            socket.bind("127.0.0.2:0".parse().expect("an address")).expect("another address");
            let mut stream = socket.connect(address).await.expect("a connection");
            let text = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
            stream.write_all(text).await.expect("a request");
            let mut said = String::new();
            stream.read_to_string(&mut said).await.expect("an answer");
            said
        };
        let said = tokio::time::timeout(Duration::from_secs(1), probe).await;
        assert!(said.expect("in a second").starts_with("HTTP/1.1 200"));
    }
}
