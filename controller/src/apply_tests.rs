//! Writes against an API server that is played over HTTP.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::*;

/// What was asked: method and path.
type Asked = Arc<Mutex<Vec<String>>>;

/// A writer whose API server has this pod and no other, and takes every eviction.
async fn with_pod(pod: Value) -> (Writer, Asked) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let asked = Asked::default();
    let heard = Arc::clone(&asked);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (pod, heard) = (pod.clone(), Arc::clone(&heard));
            let service = service_fn(move |request: Request<hyper::body::Incoming>| {
                let (pod, heard) = (pod.clone(), Arc::clone(&heard));
                async move {
                    let line = format!("{} {}", request.method(), request.uri().path());
                    heard.lock().unwrap().push(line.clone());
                    let _ = request.into_body().collect().await;
                    let answer = match line.as_str() {
                        "GET /api/v1/namespaces/a/pods/p" => (200, pod),
                        "POST /api/v1/namespaces/a/pods/p/eviction" => {
                            (201, json!({"kind": "Status", "status": "Success"}))
                        }
                        _ => (404, json!({"kind": "Status", "status": "Failure", "code": 404})),
                    };
                    let text = Bytes::from(answer.1.to_string());
                    let response = Response::builder().status(answer.0).body(Full::new(text));
                    Ok::<_, Infallible>(response.unwrap())
                }
            });
            let server = hyper::server::conn::http1::Builder::new();
            tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
        }
    });
    let config = kube::Config::new(format!("http://{address}").parse().unwrap());
    (Writer::new(Client::try_from(config).unwrap(), "vhost-rdma"), asked)
}

/// An agent says itself which pods have its NICs, and is trusted with its own node only.
#[tokio::test]
async fn a_pod_is_evicted_from_the_node_that_says_so_and_from_no_other() {
    for (uid, on, evicted) in [
        ("u", Some("n1"), true),
        ("u", Some("n2"), false),
        ("u", None, false),
        ("another", Some("n1"), false),
    ] {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "p", "namespace": "a", "uid": uid},
            "spec": {"nodeName": on, "containers": []},
        });
        let (writer, asked) = with_pod(pod).await;
        let outcome = writer
            .write(Write::Evict {
                namespace: "a".to_owned(),
                pod: "p".to_owned(),
                uid: "u".to_owned(),
                node: "n1".to_owned(),
            })
            .await
            .unwrap();
        let asked = asked.lock().unwrap();
        let did = asked.iter().any(|line| line.ends_with("/eviction"));
        assert_eq!(did, evicted, "{uid} {on:?}: {asked:?}");
        assert_eq!(outcome == Outcome::Done, evicted, "{uid} {on:?}");
    }
}
