//! Health and metrics over HTTP.
//!
//! `/healthz` says that the agent's tasks have their turns, `/readyz` that it can attach NICs,
//! `/metrics` everything else, as it was at the last change: none of them waits for a call of the
//! daemon, which may take a minute. Labels are pool, ID, and the namespace and name of the pod that
//! holds the ID: so there are never more series than IDs, whatever pods are called and however many
//! there were.
//!
//! Whoever reaches the port may ask, and is answered on the agent's only thread. So there are few
//! places, each for seconds ([`vhost_rdma_places::http`]), and metrics are written once a second at
//! most.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode, header};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use vhost_rdma_agent_api::{DeviceStatus, PoolStatus};
use vhost_rdma_places::http::{self, Text};
use vhost_rdma_proto::v1;

use crate::agent::{Agent, Snapshot};
use crate::daemon::Daemon;
use crate::holders::Kubelet;

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Connections at one time. Nobody needs more than one or two.
const PLACES: usize = 8;

/// Answers everyone at `listener`.
pub async fn serve<D: Daemon, K: Kubelet>(listener: TcpListener, agent: Arc<Agent<D, K>>) {
    let metrics = Arc::new(Text::default());
    http::serve(listener, PLACES, move |request| respond(request, &agent, &metrics)).await;
}

fn respond<D: Daemon, K: Kubelet>(
    request: &Request<Incoming>,
    agent: &Agent<D, K>,
    metrics: &Text,
) -> Response<Full<Bytes>> {
    let plain = |status: StatusCode, text: String| {
        let mut response = Response::new(Full::new(Bytes::from(text)));
        *response.status_mut() = status;
        response
    };
    if request.method() != Method::GET {
        return plain(StatusCode::METHOD_NOT_ALLOWED, "only GET\n".to_owned());
    }
    match request.uri().path() {
        "/healthz" => {
            // Nothing is waited for: this task's turn is what is asked for.
            plain(StatusCode::OK, "ok\n".to_owned())
        }
        "/readyz" => {
            let snapshot = agent.snapshot();
            let status = &snapshot.status;
            if status.ready {
                return plain(StatusCode::OK, "ok\n".to_owned());
            }
            plain(StatusCode::SERVICE_UNAVAILABLE, status.problems.join("\n") + "\n")
        }
        "/metrics" => match metrics.get(|| text(agent.snapshot())) {
            Ok(text) => {
                let mut response = Response::new(Full::new(text));
                let kind = header::HeaderValue::from_static(CONTENT_TYPE);
                response.headers_mut().insert(header::CONTENT_TYPE, kind);
                response
            }
            Err(error) => plain(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
        },
        _ => plain(StatusCode::NOT_FOUND, "there are /healthz, /readyz and /metrics\n".to_owned()),
    }
}

fn text(snapshot: Arc<Snapshot>) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("vhost_rdma_agent");
    registry.register_collector(Box::new(View(snapshot)));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).map(|()| text)
}

struct View(Arc<Snapshot>);

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("View")
    }
}

type PoolRead = fn(&PoolStatus) -> u32;
type TrafficRead = fn(&v1::Counters) -> u64;

const POOL_GAUGES: [(&str, &str, PoolRead); 5] = [
    ("pool_devices", "IDs of the pool", |pool| pool.total),
    ("pool_healthy", "IDs that can be used", |pool| pool.healthy),
    ("pool_granted", "IDs that a pod has", |pool| pool.granted),
    ("pool_free", "IDs that can be granted", |pool| pool.free),
    ("pool_registered", "1 if the kubelet knows the pool", |pool| u32::from(pool.registered)),
];

const TRAFFIC: [(&str, &str, TrafficRead); 4] = [
    ("nic_tx_bytes", "Payload bytes sent", |counters| counters.tx_bytes),
    ("nic_rx_bytes", "Payload bytes received", |counters| counters.rx_bytes),
    ("nic_tx_messages", "Messages sent", |counters| counters.tx_messages),
    ("nic_rx_messages", "Messages received", |counters| counters.rx_messages),
];

fn labels(device: &DeviceStatus) -> [(&'static str, String); 4] {
    let pod = device.pod.as_ref();
    [
        ("pool", device.pool.clone()),
        ("id", device.id.clone()),
        ("namespace", pod.map(|pod| pod.namespace.clone()).unwrap_or_default()),
        ("pod", pod.map(|pod| pod.name.clone()).unwrap_or_default()),
    ]
}

impl View {
    fn numbers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counters = &self.0.counters;
        let all = [
            ("allocations", "Containers that got their devices", counters.allocations),
            ("refusals", "Containers that got nothing", counters.refusals),
            ("reclaims", "IDs taken back after their pod was gone", counters.reclaims),
            ("config_loads", "Configurations taken", counters.reloads),
            ("config_refusals", "Configurations refused", counters.bad_reloads),
            ("daemon_losses", "Times that the daemon went away", counters.daemon_losses),
        ];
        for (name, help, value) in all {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
        }
        let flags = [
            ("config_valid", "1 if the configuration file is in force", self.0.config_valid),
            ("daemon_up", "1 if the daemon answers", self.0.daemon_up),
            ("ready", "1 if NICs can be attached", self.0.status.ready),
        ];
        for (name, help, value) in flags {
            let gauge = ConstGauge::new(i64::from(value));
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        for (name, help, value) in &self.0.channel {
            let gauge = ConstGauge::new(*value);
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }
}

impl Collector for View {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.numbers(&mut encoder)?;
        for (name, help, read) in POOL_GAUGES {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for pool in &self.0.status.pools {
                let labels = [("pool", pool.name.clone()), ("resource", pool.resource.clone())];
                ConstGauge::new(i64::from(read(pool))).encode(metric.encode_family(&labels)?)?;
            }
        }
        let held: Vec<&DeviceStatus> =
            self.0.status.devices.iter().filter(|device| device.state != "free").collect();
        let mut metric = encoder.encode_descriptor(
            "nic_healthy",
            "1 if a granted NIC can be used",
            None,
            MetricType::Gauge,
        )?;
        for device in &held {
            let gauge = ConstGauge::new(i64::from(device.healthy));
            gauge.encode(metric.encode_family(&labels(device))?)?;
        }
        let counters: HashMap<&str, &v1::Counters> = self
            .0
            .nics
            .iter()
            .filter_map(|(id, nic)| Some((id.as_str(), nic.counters.as_ref()?)))
            .collect();
        for (name, help, read) in TRAFFIC {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for device in &held {
                if let Some(counters) = counters.get(device.id.as_str()) {
                    ConstCounter::new(read(counters))
                        .encode(metric.encode_family(&labels(device))?)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn what_metrics_cost_grows_with_the_nics_and_not_with_their_square() {
        let mut snapshot = Snapshot::default();
        for n in 0..20_000 {
            let id = format!("blue-{n}");
            let device = serde_json::json!({
                "pool": "blue", "id": id, "state": "attached", "healthy": true, "cordoned": false,
            });
            snapshot.status.devices.push(serde_json::from_value(device).unwrap());
            let counters = Some(v1::Counters { tx_bytes: n, ..v1::Counters::default() });
            snapshot.nics.push((id, v1::Nic { counters, ..v1::Nic::default() }));
        }
        let mut registry = Registry::default();
        registry.register_collector(Box::new(View(Arc::new(snapshot))));
        let began = Instant::now();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let took = began.elapsed();
        assert!(text.contains("id=\"blue-19999\",namespace=\"\",pod=\"\"} 19999\n"), "{text:.999}");
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
}
