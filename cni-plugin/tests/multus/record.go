// Records how Multus calls this plugin for one pod with one secondary network.
//
// Multus shapes the configuration and the arguments of a delegate and hands both to libcni, which
// makes the calls. libcni is the real one here, in the way in which Multus uses it; the Multus
// program is not (no package has it), so what it hands over is made below, one statement for each
// of its own. Named are the functions of multus-cni 4, pkg/types/conf.go and pkg/multus/multus.go.
//
// The plugin that is called is cni-plugin/skel/examples/record.rs. README.md beside this has the
// commands.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/libcni"
)

const (
	sandbox = "7e1c2d4c5b6a79880f1e2d3c4b5a69788796a5b4c3d2e1f00112233445566778"
	uid     = "0c8d9f0e-5a54-4f0b-9a43-6d1a2f6b7c11"
	netns   = "/var/run/netns/cni-3f1f9a52-0d5e-4f5a-8a52-6f2f3d1d7e90"
	ifname  = "net1" // getIfname: "net" and the delegate's place
	device  = "blue-0"
	// Of the pod's annotation: k8s.v1.cni.cncf.io/networks: [{"name": "blue", "mac": …}]
	mac = "02:00:00:00:00:07"

	// What containerd gives Multus (internal/cri/server/sandbox_run.go, toCNILabels), in one of
	// the orders that a Go map has.
	runtimeArgs = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;" +
		"K8S_POD_INFRA_CONTAINER_ID=" + sandbox + ";K8S_POD_UID=" + uid
)

// attachment is the spec.config of the NetworkAttachmentDefinition shop/blue, as docs/CNI.md has
// it.
func attachment(version, record string) map[string]interface{} {
	return map[string]interface{}{
		"cniVersion": version, "name": "blue", "type": "vhost-rdma-cni", "record": record,
		"agentSocket":  "/run/vhost-rdma-agent/agent.sock",
		"capabilities": map[string]bool{"mac": true, "CNIDeviceInfoFile": true},
		"ipam":         map[string]string{"type": "ipam"},
	}
}

// conf is one plugin's configuration: LoadDelegateNetConf, delegateAddDeviceID.
func conf(version, record string) []byte {
	plugin := attachment(version, record)
	plugin["deviceID"] = device
	plugin["pciBusID"] = device
	return marshal(plugin)
}

// list is a list of one plugin: LoadDelegateNetConf, addDeviceIDInConfList.
func list(version, record string) []byte {
	plugin := attachment(version, record)
	delete(plugin, "cniVersion")
	delete(plugin, "name")
	plugin["deviceID"] = device
	plugin["pciBusID"] = device
	plugins := []interface{}{plugin}
	return marshal(map[string]interface{}{
		"cniVersion": version, "name": "blue", "plugins": plugins,
	})
}

// arguments are what newCNIRuntimeConf makes: its own pairs, then each of the runtime's. A key that
// has a value already is not left out, so most come twice, and IgnoreUnknown with two spellings.
func arguments(netns string) *libcni.RuntimeConf {
	rt := &libcni.RuntimeConf{ContainerID: sandbox, NetNS: netns, IfName: ifname}
	rt.Args = [][2]string{
		{"IgnoreUnknown", "true"},
		{"K8S_POD_NAMESPACE", "shop"},
		{"K8S_POD_NAME", "web-0"},
		{"K8S_POD_INFRA_CONTAINER_ID", sandbox},
		{"K8S_POD_UID", uid},
	}
	for _, pair := range strings.Split(runtimeArgs, ";") {
		keyval := strings.SplitN(pair, "=", 2)
		rt.Args = append(rt.Args, [2]string{keyval[0], keyval[1]})
	}
	// All of them; libcni passes on those that the configuration declares. The file:
	// delegateRuntimeConfig and, of the network-attachment-definition-client,
	// pkg/utils/net-attach-def.go, GetCNIDeviceInfoPath.
	rt.CapabilityArgs = map[string]interface{}{
		"mac":               mac,
		"deviceID":          device,
		"CNIDeviceInfoFile": "/var/run/k8s.cni.cncf.io/devinfo/cni/shop-blue-" + sandbox + "_" + ifname,
	}
	return rt
}

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: record CNI-VERSION PLUGIN-DIRECTORY FILE")
		os.Exit(2)
	}
	version, plugins, record := os.Args[1], os.Args[2], os.Args[3]
	cache, err := os.MkdirTemp("", "multus-cache")
	must(err)
	defer os.RemoveAll(cache)
	ctx := context.Background()

	// confAdd, confCheck, confDel
	cni := libcni.NewCNIConfigWithCacheDir([]string{plugins}, filepath.Join(cache, "conf"), nil)
	one, err := libcni.ConfFromBytes(conf(version, record))
	must(err)
	_, err = cni.AddNetwork(ctx, one, withMac(arguments(netns)))
	must(err)
	must(cni.CheckNetwork(ctx, one, arguments(netns)))
	must(cni.DelNetwork(ctx, one, arguments(netns)))
	// Again, as a runtime does for a sandbox whose namespace is gone: CmdDel goes on without
	// one.
	must(cni.DelNetwork(ctx, one, arguments("")))

	// conflistAdd, conflistCheck, conflistDel
	cni = libcni.NewCNIConfigWithCacheDir([]string{plugins}, filepath.Join(cache, "list"), nil)
	all, err := libcni.ConfListFromBytes(list(version, record))
	must(err)
	_, err = cni.AddNetworkList(ctx, all, withMac(arguments(netns)))
	must(err)
	must(cni.CheckNetworkList(ctx, all, arguments(netns)))
	must(cni.DelNetworkList(ctx, all, arguments(netns)))
}

// withMac: delegateAdd tells the address by this way too.
func withMac(rt *libcni.RuntimeConf) *libcni.RuntimeConf {
	rt.Args = append(rt.Args, [2]string{"MAC", mac})
	return rt
}

func marshal(value interface{}) []byte {
	bytes, err := json.Marshal(value)
	must(err)
	return bytes
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
