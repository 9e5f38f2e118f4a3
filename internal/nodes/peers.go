package nodes

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Peers serves requests of the other nodes of a job to this one, next to the control plane:
// large bodies between two nodes do not pass through the coordinator. Both sides are
// authenticated: the server by the digest of its certificate, which the coordinator passes on,
// and the client by the job's token.
type Peers struct {
	listener    net.Listener
	server      *http.Server
	certificate string // digest
	handler     atomic.Pointer[http.Handler]
}

// bulkKey is of the connection of a request.
type bulkKey struct{}

// ListenPeers listens at a free port of host, an address of this node; empty: of all addresses.
// Requests are refused until [Link.ServePeers] or [Endpoint.ServePeers] is called. The
// node that joins declares the port: see [Peers.Declare].
func ListenPeers(ctx context.Context, host string, log *slog.Logger) (*Peers, error) {
	certificate, err := newCertificate(time.Now())
	if err != nil {
		return nil, fmt.Errorf("make the certificate of this node: %w", err)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, fmt.Errorf("listen for other nodes: %w; give an address of this node as --local-addr", err)
	}
	p := &Peers{listener: listener, certificate: digest(certificate.Certificate[0])}
	p.server = &http.Server{
		Handler:           http.HandlerFunc(p.serve), // HTTP/1.1: its bodies are faster
		ReadHeaderTimeout: slowRequest,               // with the handshake
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    smallBody,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, bulkKey{}, c)
		},
	}
	config := &tls.Config{
		Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS13, NextProtos: []string{"http/1.1"}, DynamicRecordSizingDisabled: true,
	}
	go func() { _ = p.server.Serve(bulkListener{&strangers{Listener: listener}, config}) }() // until Close
	return p, nil
}

// Declare adds the port and the certificate to what a node declares. It does nothing for nil.
func (p *Peers) Declare(n *Node) {
	if p == nil {
		return
	}
	if at, ok := p.listener.Addr().(*net.TCPAddr); ok {
		n.PeerPort, n.PeerPin = at.Port, p.certificate
	}
}

// Close ends the server with its connections. It does nothing for nil.
func (p *Peers) Close() error {
	if p == nil {
		return nil
	}
	return p.server.Close()
}

// serve bounds the time of a request until it is known to be one of the job: the server reads what is left of
// the body of a refused one. The handlers of the job have limits of their own.
func (p *Peers) serve(w http.ResponseWriter, r *http.Request) {
	limit(w)
	h := p.handler.Load()
	if h == nil {
		httpkit.Refuse(w, problem.Errorf(problem.Unavailable, "this node has not joined the job yet"))
		return
	}
	(*h).ServeHTTP(w, r)
}

// serveWith serves requests that bear a token.
func (p *Peers) serveWith(token string, h http.Handler) {
	authorized := http.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !httpkit.Authorized(r, token) {
			httpkit.Refuse(w, problem.Errorf(problem.Unauthorized, "the token is not that of the job of this node"))
			return
		}
		unlimit(w)
		if c, ok := r.Context().Value(bulkKey{}).(*bulk); ok {
			c.trust()
		}
		h.ServeHTTP(w, r)
	}))
	p.handler.Store(&authorized)
}

// ServePeers serves the requests of other nodes of the job.
func (l *Link) ServePeers(p *Peers, h http.Handler) {
	as, _ := l.credential()
	p.serveWith(as.token, h)
}

// ServePeers serves the requests of other nodes of the job.
func (e *Endpoint) ServePeers(p *Peers, h http.Handler) { p.serveWith(e.token, h) }

// PeerURL returns where a node serves the requests of others, or an empty string.
func (n Node) PeerURL() string {
	if n.PeerPort == 0 || n.PeerPin == "" || n.Address == "" {
		return ""
	}
	return "https://" + net.JoinHostPort(n.Address, strconv.Itoa(n.PeerPort))
}

// PeerClient returns a client for requests to the node whose certificate has the digest pin:
// see [Node.PeerPin]. The caller bounds each request by its context.
func (l *Link) PeerClient(pin string) *http.Client {
	as, _ := l.credential()
	return peerClient(l.c.dial, as.token, pin)
}

// PeerClient returns a client for requests to the node whose certificate has the digest pin.
func (e *Endpoint) PeerClient(pin string) *http.Client { return peerClient(nil, e.token, pin) }

// peerConnections is how many connections to another node wait for the next request.
const peerConnections = 3

// peerPatience bounds how long a connection to another node may take.
const peerPatience = 5 * time.Second

// errOtherPeer reports a node with another certificate than the declared one.
var errOtherPeer = problem.New(problem.Foreign, "the node has another certificate than it declared")

func peerClient(dial dialFunc, token, pin string) *http.Client {
	if dial == nil {
		dial = (&net.Dialer{Timeout: peerPatience}).DialContext
	}
	return &http.Client{
		Transport: peerTransport{token, &http.Transport{
			DialTLSContext: dialBulk(dial, &tls.Config{
				MinVersion: tls.VersionTLS13, NextProtos: []string{"http/1.1"}, DynamicRecordSizingDisabled: true,
				InsecureSkipVerify: true, // the digest decides, not a name
				VerifyConnection: func(state tls.ConnectionState) error {
					if !same(digest(state.PeerCertificates[0].Raw), pin) {
						return errOtherPeer
					}
					return nil
				},
			}),
			DisableCompression:  true,
			MaxIdleConnsPerHost: peerConnections,
			IdleConnTimeout:     time.Minute,
			WriteBufferSize:     256 << 10,
			ReadBufferSize:      256 << 10,
		}},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// peerTransport adds the job's token to requests to another node.
type peerTransport struct {
	token string
	by    *http.Transport
}

var _ http.RoundTripper = peerTransport{}

// RoundTrip implements [http.RoundTripper].
func (t peerTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	credential{token: t.token}.set(r)
	return t.by.RoundTrip(r)
}

// CloseIdleConnections closes the connections that serve no request: see [http.Client].
func (t peerTransport) CloseIdleConnections() { t.by.CloseIdleConnections() }

// LocalAddress returns the address from which this node reaches an endpoint, HOST:PORT. It is
// empty if a name stands for this node's loopback address here, as in /etc/hosts of some
// systems: other nodes have another address for it. LocalAddress sends nothing.
func LocalAddress(ctx context.Context, endpoint string) (string, error) {
	c, err := (&net.Dialer{Timeout: peerPatience}).DialContext(ctx, "udp", endpoint)
	if err != nil {
		return "", fmt.Errorf("address of this node towards %s: %w; give it as --local-addr", endpoint, err)
	}
	defer func() { _ = c.Close() }() // nothing was sent
	at, ok := c.LocalAddr().(*net.UDPAddr)
	if !ok {
		return "", errors.New("no address")
	}
	host, _, err := net.SplitHostPort(endpoint)
	if literal := net.ParseIP(host); err == nil && literal == nil && host != "localhost" && at.IP.IsLoopback() {
		return "", nil
	}
	return at.IP.String(), nil
}
