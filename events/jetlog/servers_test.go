package jetlog

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
)

// cluster is three servers of one cluster, each in its own directory.
type cluster struct {
	t       *testing.T
	servers []*server.Server
	start   []func() *server.Server
	owner   string // credentials of the owner's connection to the first of them
}

func startCluster(t *testing.T, n int) *cluster {
	t.Helper()
	c := &cluster{t: t}
	var routes []*url.URL
	// Every server must know the ports of all before it starts. No other test takes a port
	// meanwhile, because none uses this address.
	host := fmt.Sprintf("127.%d.%d.%d", 1+rand.IntN(254), rand.IntN(256), 1+rand.IntN(254))
	for range n {
		l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
		if err != nil {
			t.Fatal(err)
		}
		routes = append(routes, &url.URL{Scheme: "nats", Host: l.Addr().String()})
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for i, route := range routes {
		o := &server.Options{}
		if err := o.ProcessConfigString(accounts); err != nil {
			t.Fatal(err)
		}
		port, err := net.LookupPort("tcp", route.Port())
		if err != nil {
			t.Fatal(err)
		}
		o.ServerName, o.Host, o.Port, o.NoSigs, o.NoLog = fmt.Sprint("n", i), "127.0.0.1", server.RANDOM_PORT, true, true
		o.JetStream, o.StoreDir, o.SyncAlways = true, t.TempDir(), true
		o.Cluster = server.ClusterOpts{Name: "ckpt", Host: host, Port: port}
		o.Routes = routes
		start := func() *server.Server {
			o := o.Clone()
			d := newDoorman()
			o.CustomClientAuthentication = everyone{d}
			ns, err := server.NewServer(o)
			if err != nil {
				t.Fatal(err)
			}
			if d.account, err = ns.LookupAccount(Account); err != nil {
				t.Fatal(err)
			}
			if i == 0 {
				c.owner = d.owner
			}
			ns.Start()
			t.Cleanup(func() {
				ns.Shutdown()
				ns.WaitForShutdown()
			})
			return ns
		}
		c.start = append(c.start, start)
		c.servers = append(c.servers, start())
	}
	c.wait("a leader and all peers", func() bool {
		for _, ns := range c.servers {
			if ns.JetStreamIsLeader() {
				return len(ns.JetStreamClusterPeers()) == n
			}
		}
		return false
	})
	return c
}

func (c *cluster) wait(what string, is func() bool) {
	c.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.After(20 * time.Second)
	for !is() {
		select {
		case <-tick.C:
		case <-late:
			c.t.Fatalf("no %s", what)
		}
	}
}

// restart restarts a server that was shut down, over its directory and on its port for
// clients.
func (c *cluster) restart(i int) {
	c.t.Helper()
	c.servers[i].WaitForShutdown()
	c.servers[i] = c.start[i]()
}

func (c *cluster) url() string {
	var all []string
	for _, ns := range c.servers {
		all = append(all, ns.ClientURL())
	}
	return strings.Join(all, ",")
}

// stopLeader stops the server that leads the log.
func (c *cluster) stopLeader() {
	c.t.Helper()
	c.wait("leader of the log", func() bool {
		for _, ns := range c.servers {
			if ns.Running() && ns.JetStreamIsStreamLeader(Account, Stream) {
				ns.Shutdown()
				return true
			}
		}
		return false
	})
}

// forget deletes the log from within a server, which clients cannot do.
func (c *cluster) forget() {
	c.t.Helper()
	if err := c.inside().DeleteStream(c.t.Context(), Stream); err != nil {
		c.t.Fatal(err)
	}
}

// inside returns a connection within a server, which may change streams.
func (c *cluster) inside() jetstream.JetStream {
	c.t.Helper()
	return connectTo(c.t, Options{Token: c.owner, Dial: func(context.Context) (net.Conn, error) { return c.servers[0].InProcessConn() }}).js
}

// everyone lets clients in over TCP too, as a standalone server does.
type everyone struct{ *doorman }

func (e everyone) Check(c server.ClientAuthentication) bool {
	if !e.doorman.Check(c) {
		c.RegisterUser(e.client())
	}
	return true
}
