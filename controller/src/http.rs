//! Health and metrics over HTTP.
//!
//! `/healthz` fails when the engine does not turn: a restart is then the cure. `/readyz` fails
//! until the copy of the cluster is complete. A replica that does not lead is as healthy as one
//! that does.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::time::Instant;

use crate::metrics::Metrics;

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// An engine that has not turned for so long does not turn any more.
const STALLED: Duration = Duration::from_secs(30);
/// How long a client may take for its request.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections at a time: more wait.
const CONNECTIONS: usize = 64;

/// Answers everyone at `listener`.
pub async fn serve(listener: TcpListener, metrics: Arc<Metrics>, started: Instant) {
    let places = Arc::new(tokio::sync::Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept an HTTP connection");
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let metrics = Arc::clone(&metrics);
        tokio::spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let response = respond(&request, &metrics, started.elapsed());
                async move { response }
            });
            let mut server = hyper::server::conn::http1::Builder::new();
            server.timer(TokioTimer::new()).header_read_timeout(PATIENCE);
            let served = server.serve_connection(TokioIo::new(stream), service);
            // A client that keeps its connection open begins a new one after a while.
            let _ = tokio::time::timeout(PATIENCE * 6, served).await;
            drop(place);
        });
    }
}

fn respond<B>(
    request: &Request<B>,
    metrics: &Metrics,
    now: Duration,
) -> Result<Response<Full<Bytes>>, hyper::http::Error> {
    let plain = |status: StatusCode, text: &'static str| {
        Response::builder().status(status).body(Full::new(Bytes::from(text)))
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
            let mut text = String::new();
            match prometheus_client::encoding::text::encode(&mut text, &metrics.registry()) {
                Ok(()) => Response::builder()
                    .header(header::CONTENT_TYPE, CONTENT_TYPE)
                    .body(Full::new(Bytes::from(text))),
                Err(_) => plain(StatusCode::INTERNAL_SERVER_ERROR, "cannot write the metrics\n"),
            }
        }
        _ => plain(StatusCode::NOT_FOUND, "there are /healthz, /readyz and /metrics\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(path: &str, metrics: &Metrics, now: u64) -> StatusCode {
        let request = Request::get(path).body(()).expect("a request");
        respond(&request, metrics, Duration::from_secs(now)).expect("a response").status()
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
}
