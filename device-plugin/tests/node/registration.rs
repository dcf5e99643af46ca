//! Registration that survives whatever the kubelet does.

use vhost_rdma_agent::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, Empty, HEALTHY,
    PreferredAllocationRequest, UNHEALTHY,
};

use crate::kubelet::{eventually, list_where};
use crate::world::{BLUE, World};

#[tokio::test]
async fn a_kubelet_registers_lists_prefers_and_allocates() {
    let world = World::new().await;
    let mut plugin = world.kubelet.plugin(BLUE).await;
    let mut lists = plugin.list_and_watch(Empty {}).await.unwrap().into_inner();
    let list = list_where(&mut lists, "all are healthy", |list| {
        list.values().all(|health| health == HEALTHY)
    })
    .await;
    assert_eq!(list.keys().collect::<Vec<_>>(), ["blue-0", "blue-1", "blue-2", "blue-3"]);
    let request = ContainerPreferredAllocationRequest {
        available_device_i_ds: list.keys().cloned().collect(),
        must_include_device_i_ds: vec!["blue-2".to_owned()],
        allocation_size: 2,
    };
    let preferred = plugin
        .get_preferred_allocation(PreferredAllocationRequest { container_requests: vec![request] })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(preferred.container_responses[0].device_i_ds, ["blue-2", "blue-0"]);
    let container = |ids: &[&str]| ContainerAllocateRequest {
        devices_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
    };
    let answer = plugin
        .allocate(AllocateRequest {
            container_requests: vec![container(&["blue-1", "blue-0"]), container(&["blue-3"])],
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.container_responses.len(), 2);
    let first = &answer.container_responses[0];
    assert_eq!(first.envs["VHOST_RDMA_BLUE"], "blue-0,blue-1");
    assert_eq!(first.mounts.len(), 2);
    assert!(first.mounts.iter().all(|mount| mount.read_only));
    for mount in &first.mounts {
        let document: serde_json::Value = serde_json::from_slice(
            &std::fs::read(format!("{}/nic.json", mount.host_path)).unwrap(),
        )
        .unwrap();
        assert_eq!(document["dir"], mount.container_path.as_str());
        assert_eq!(document["network"], "blue");
    }
    assert!(world.path("devinfo/vhost-rdma.io-blue-blue-3-device.json").exists());
    let missing =
        plugin.allocate(AllocateRequest { container_requests: vec![container(&["blue-9"])] }).await;
    assert!(missing.unwrap_err().message().contains("has no blue-9"));
}

#[tokio::test]
async fn a_kubelet_that_starts_again_finds_the_plugin_again() {
    let mut world = World::new().await;
    for round in 1..4 {
        let mut plugin = world.kubelet.plugin(BLUE).await;
        let mut lists = plugin.list_and_watch(Empty {}).await.unwrap().into_inner();
        list_where(&mut lists, "four are there", |list| list.len() == 4).await;
        assert!(world.kubelet.registrations() >= round);
        world.kubelet.restart();
    }
}

#[tokio::test]
async fn a_kubelet_that_does_not_watch_is_told_again() {
    let world = World::new().await;
    world.kubelet.plugin(BLUE).await;
    // Registered, but no stream is ever opened: a kubelet that lost the plugin without a new
    // socket.
    eventually("a second registration", || (world.kubelet.registrations() > 1).then_some(())).await;
}

#[tokio::test]
async fn a_plugin_socket_that_somebody_removes_comes_back() {
    let world = World::new().await;
    world.kubelet.plugin(BLUE).await;
    let socket = world.kubelet.plugins().join("vhost-rdma-blue.sock");
    std::fs::remove_file(&socket).unwrap();
    eventually("the socket is there again", || socket.exists().then_some(())).await;
    world.kubelet.plugin(BLUE).await;
}

#[tokio::test]
async fn health_follows_the_daemon_and_comes_back() {
    let world = World::new().await;
    let mut plugin = world.kubelet.plugin(BLUE).await;
    let mut lists = plugin.list_and_watch(Empty {}).await.unwrap().into_inner();
    let all = |health: &'static str| {
        move |list: &std::collections::BTreeMap<String, String>| {
            list.values().all(|seen| seen == health)
        }
    };
    list_where(&mut lists, "all are healthy", all(HEALTHY)).await;
    world.daemon.table().down = true;
    world.agent().reconcile().await;
    list_where(&mut lists, "all are unhealthy", all(UNHEALTHY)).await;
    assert!(world.allocate(&["blue-0"]).await.unwrap_err().contains("daemon does not answer"));
    world.daemon.restart();
    world.agent().reconcile().await;
    list_where(&mut lists, "all are healthy again", all(HEALTHY)).await;
}

#[tokio::test]
async fn an_old_kubelet_puts_a_path_into_the_authority() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    let world = World::new().await;
    world.kubelet.plugin(BLUE).await;
    let path = world.kubelet.plugins().join("vhost-rdma-blue.sock");
    let mut stream = tokio::net::UnixStream::connect(&path).await.unwrap();
    let path = path.to_str().unwrap();
    // What grpc-go 1.27 sends: POST, http, the method's path, the socket as authority; HPACK
    // literals without Huffman.
    let literal = |index: u8, value: &str| {
        let mut field = vec![0x40 | index, u8::try_from(value.len()).unwrap()];
        field.extend(value.as_bytes());
        field
    };
    let mut block = vec![0x83, 0x86];
    block.extend(literal(4, "/v1beta1.DevicePlugin/GetDevicePluginOptions"));
    block.extend(literal(1, path));
    block.extend(literal(31, "application/grpc"));
    block.extend([0x40, 2, b't', b'e', 8]);
    block.extend(b"trailers");
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
    };
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(4, 0, 0, &[]));
    bytes.extend(frame(1, 4, 1, &block));
    bytes.extend(frame(0, 1, 1, &[0, 0, 0, 0, 0]));
    stream.write_all(&bytes).await.unwrap();
    let mut kinds = Vec::new();
    loop {
        let mut header = [0; 9];
        stream.read_exact(&mut header).await.unwrap();
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut payload).await.unwrap();
        kinds.push(header[3]);
        assert_ne!(header[3], 3, "the stream was reset: the request was refused");
        if header[3] == 0 {
            // DevicePluginOptions with get_preferred_allocation_available.
            assert_eq!(payload, [0, 0, 0, 0, 2, 0x10, 1]);
            return;
        }
        assert!(kinds.len() < 20, "no answer came: {kinds:?}");
    }
}
