package api

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/store/sockets"
)

// Listen configures a [Server].
type Listen struct {
	Address string   // HOST:PORT; port 0 chooses a free one
	Cert    string   // path of the server's certificate, PEM; required off loopback
	Key     string   // path of its key, which only this user can read
	Users   string   // path of a file for [OpenUsers]; empty: only this user, by a token of its own
	Hosts   []string // further names of the server
	Logs    []string // directories of workers' output that it shows, besides that of the store
	Page    http.Handler
	Observe http.Handler // see [Options]
	Version string
	Logger  *slog.Logger // default: discard

	limit time.Duration // for a request and its answer; default exchangeTime
	most  int           // connections at once; default mostConnections
}

// Flags adds the options of a server to a command.
func (l *Listen) Flags(f *pflag.FlagSet, address string) {
	f.StringVar(&l.Address, "http", address, "serve the HTTP API on HOST:PORT")
	f.StringVar(&l.Cert, "http-cert", "", "certificate of the HTTP API, PEM; required on an address that other machines can reach")
	f.StringVar(&l.Key, "http-key", "", "key of --http-cert; only its user may be able to read it")
	f.StringVar(&l.Users, "http-users", "", "file of users of the HTTP API, made by ckptstore access issue")
	f.StringSliceVar(&l.Hosts, "http-host", nil, "further names of the HTTP server, which clients may use (repeatable)")
	f.StringArrayVar(&l.Logs, "http-logs", nil, "also show workers' output below this directory: that of trainer run --log-dir (repeatable)")
}

// Validate returns an error for an address that other machines can reach without TLS, and for
// a relative directory of output.
func (l Listen) Validate() error {
	bad := func(format string, values ...any) error {
		return problem.Errorf(problem.Invalid, "--http %s: "+format, append([]any{l.Address}, values...)...)
	}
	host, _, err := net.SplitHostPort(l.Address)
	if err != nil {
		return bad("%w: want HOST:PORT, such as 127.0.0.1:7700", err)
	}
	if (l.Cert == "") != (l.Key == "") {
		return bad("a certificate needs its key, and a key its certificate: give --http-cert and --http-key")
	}
	for _, dir := range l.Logs {
		if !filepath.IsAbs(dir) {
			return bad("--http-logs %s: give an absolute path, as the log has it", dir)
		}
	}
	if l.Cert == "" && !loopback(host) {
		return bad("other machines can reach this address, and without TLS they can read the token on the way: give --http-cert and --http-key, or 127.0.0.1 and a tunnel: `ckptstore ui` prints the ssh command")
	}
	return nil
}

func loopback(host string) bool {
	address, err := netip.ParseAddr(host)
	return strings.EqualFold(host, "localhost") || err == nil && address.IsLoopback()
}

// Record is what a running server leaves for other processes of its user.
type Record struct {
	Store    string    `json:"store"` // its identity, or its name if it is a copy
	Location string    `json:"location"`
	URL      string    `json:"url"`
	PID      int       `json:"pid"`
	Started  time.Time `json:"started"`
}

// Server is a [Handler] on a listener.
type Server struct {
	Record
	token   string
	handler *Handler
	http    *http.Server
	record  *os.File // locked while the server runs
	path    string   // of the record
	served  chan error
}

// Times of a connection.
const (
	headTime = 10 * time.Second
	idleTime = 2 * time.Minute
	lastTime = 2 * time.Second // for requests that run when the server ends
	// exchangeTime bounds a request with its body, and its answer as well. A stream has limits of
	// its own.
	exchangeTime = answerLimit + time.Minute
)

// mostConnections is how many connections a server has at once. Further ones wait.
const mostConnections = 1000

// mostStreams is how many of them are streams, which may last for days. Further ones are refused:
// the others are for requests, among them the probes of a supervisor that would end a server
// without an answer.
const mostStreams = mostConnections / 2

// maxHead is the longest head of a request, in bytes.
const maxHead = 64 << 10

// Serve serves a store until [Server.Close].
func Serve(ctx context.Context, st *store.Store, l Listen) (_ *Server, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("serve the HTTP API: %w", err)
		}
	}()
	if err := l.Validate(); err != nil {
		return nil, err
	}
	if l.Logger == nil {
		l.Logger = slog.New(slog.DiscardHandler)
	}
	var users both
	if l.Users != "" {
		file, err := OpenUsers(l.Users, l.Logger)
		if err != nil {
			return nil, err
		}
		users = append(users, file)
	}
	var secure *tls.Config
	if l.Cert != "" {
		if secure, err = l.certificate(); err != nil {
			return nil, err
		}
	}
	name := cmp.Or(st.Copy, st.ID)
	token, err := ownToken(name)
	if err != nil {
		return nil, err
	}
	users = append(users, Users{NewUser(fmt.Sprintf("%s%d", ownPrefix, os.Getuid()), Admin, token)})
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", l.Address)
	if err != nil {
		return nil, err
	}
	s := &Server{token: token, served: make(chan error, 1)}
	s.Record = Record{Store: name, Location: st.Location, URL: l.url(listener.Addr(), secure != nil), PID: os.Getpid(), Started: time.Now().UTC()}
	if s.record, s.path, err = s.announce(); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	s.handler = New(st, Options{Users: users, Hosts: l.names(secure), Logs: l.Logs, Page: l.Page, Observe: l.Observe, Version: l.Version, Logger: l.Logger})
	s.http = &http.Server{
		Handler: s.handler, ReadHeaderTimeout: headTime, ReadTimeout: cmp.Or(l.limit, exchangeTime), WriteTimeout: cmp.Or(l.limit, exchangeTime), IdleTimeout: idleTime, MaxHeaderBytes: maxHead,
		ErrorLog: slog.NewLogLogger(l.Logger.Handler(), slog.LevelDebug),
	}
	listener = newBounded(listener, cmp.Or(l.most, mostConnections))
	if secure != nil {
		listener = tls.NewListener(listener, secure)
	}
	go func() { s.served <- s.http.Serve(listener) }()
	return s, nil
}

// bounded is a listener with a limit of connections.
type bounded struct {
	net.Listener
	places chan struct{} // a connection holds one
	ended  chan struct{}
	end    func()
}

func newBounded(l net.Listener, most int) *bounded {
	b := &bounded{Listener: l, places: make(chan struct{}, most), ended: make(chan struct{})}
	b.end = sync.OnceFunc(func() { close(b.ended) })
	return b
}

// Accept implements [net.Listener]. It waits for a place.
func (b *bounded) Accept() (net.Conn, error) {
	select {
	case b.places <- struct{}{}:
	case <-b.ended:
		return nil, net.ErrClosed
	}
	leave := sync.OnceFunc(func() { <-b.places })
	c, err := b.Listener.Accept()
	if err != nil {
		leave()
		return nil, err
	}
	return &placed{c, leave}, nil
}

// Close implements [net.Listener].
func (b *bounded) Close() error {
	b.end()
	return b.Listener.Close()
}

// placed is a connection that holds a place until it is closed.
type placed struct {
	net.Conn
	leave func()
}

// Close implements [net.Conn].
func (p *placed) Close() error {
	defer p.leave()
	return p.Conn.Close()
}

// certificate reads the certificate and its key.
func (l Listen) certificate() (*tls.Config, error) {
	info, err := os.Stat(l.Key)
	if err == nil {
		err = private.Secret(l.Key, info, "chmod 600 "+l.Key)
	}
	if err != nil {
		return nil, problem.Errorf(problem.Invalid, "--http-key: %w", err)
	}
	pair, err := tls.LoadX509KeyPair(l.Cert, l.Key)
	if err != nil {
		return nil, problem.Errorf(problem.Invalid, "--http-cert %s with --http-key %s: %w", l.Cert, l.Key, err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}, nil
}

// names returns the names by which clients may call the server: those that were given, the host
// of the address, and those in the certificate.
func (l Listen) names(secure *tls.Config) []string {
	names := append([]string{}, l.Hosts...)
	if host, _, err := net.SplitHostPort(l.Address); err == nil && host != "" {
		names = append(names, host)
	}
	if secure == nil || secure.Certificates[0].Leaf == nil {
		return names
	}
	leaf := secure.Certificates[0].Leaf
	names = append(names, leaf.DNSNames...)
	for _, ip := range leaf.IPAddresses {
		names = append(names, ip.String())
	}
	return names
}

// url returns the address for clients on this machine.
func (l Listen) url(bound net.Addr, secure bool) string {
	u := url.URL{Scheme: "http", Host: bound.String(), Path: "/"}
	if secure {
		u.Scheme = "https"
	}
	host, port, err := net.SplitHostPort(bound.String())
	if address, perr := netip.ParseAddr(host); err == nil && perr == nil && address.IsUnspecified() {
		host = "127.0.0.1"
		if names := l.Hosts; len(names) > 0 {
			host = names[0]
		}
		u.Host = net.JoinHostPort(host, port)
	}
	return u.String()
}

// Link returns the address of a place of the page, with the token in the fragment, which
// browsers do not send.
func (s *Server) Link(place string) string { return s.Record.Link(s.token, place) }

// Link is [Server.Link] for the server of a record.
func (r Record) Link(token, place string) string {
	return r.URL + "#" + place + "?token=" + token
}

// Tunnel returns the command that makes the server reachable on another machine.
func (r Record) Tunnel() string {
	port := "7700"
	if u, err := url.Parse(r.URL); err == nil && u.Port() != "" {
		port = u.Port()
	}
	host, err := os.Hostname()
	if err != nil {
		host = "HOST"
	}
	return fmt.Sprintf("ssh -L %s:127.0.0.1:%s %s", port, port, host)
}

// Close ends the streams and the server.
func (s *Server) Close() error {
	s.handler.Close()
	ctx, cancel := context.WithTimeout(context.Background(), lastTime)
	defer cancel()
	err := s.http.Shutdown(ctx)
	if err != nil {
		err = s.http.Close()
	}
	if serr := <-s.served; !errors.Is(serr, http.ErrServerClosed) {
		err = errors.Join(err, serr)
	}
	return errors.Join(err, os.Remove(s.path), s.record.Close())
}

// A user's servers and their tokens are in a directory that only this user can open:
//
//	ckptstore-http/STORE.token     the token, the same for all servers of the store
//	ckptstore-http/STORE.PID.json  a [Record]; its server holds an exclusive flock(2) on it
const serversName = "ckptstore-http"

// ownToken returns this user's token for a store. It is kept, so that clients of a server that
// was restarted reconnect.
func ownToken(name string) (string, error) {
	dir, err := sockets.UserDir(serversName)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, name+".token")
	for range 2 {
		token, err := readToken(path)
		if !errors.Is(err, fs.ErrNotExist) {
			return token, err
		}
		random := make([]byte, 32)
		_, _ = rand.Read(random) // never fails
		fresh, err := os.CreateTemp(dir, "new-*")
		if err != nil {
			return "", err
		}
		_, err = fresh.WriteString(hex.EncodeToString(random) + "\n")
		err = errors.Join(err, fresh.Close())
		if err == nil {
			err = os.Link(fresh.Name(), path) // of two servers, one makes the token
		}
		err = errors.Join(err, os.Remove(fresh.Name()))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return "", err
		}
	}
	return readToken(path)
}

func readToken(path string) (string, error) {
	text, err := readPrivate(path)
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(text))
	if raw, err := hex.DecodeString(token); err != nil || len(raw) != 32 {
		return "", problem.Errorf(problem.Damage, "%s holds no token: remove it", path)
	}
	return token, nil
}

// readPrivate reads a small file that only this user can have written.
func readPrivate(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if err := private.File(path, info, "remove it"); err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(f, 64<<10))
}

// announce writes the record of the server and locks it, and then gives it the name by which
// [Find] looks for it: a record without a lock is that of a dead server, and is removed.
func (s *Server) announce() (record *os.File, path string, err error) {
	dir, err := sockets.UserDir(serversName)
	if err != nil {
		return nil, "", err
	}
	text, err := json.Marshal(s.Record)
	if err != nil {
		return nil, "", err
	}
	f, err := os.CreateTemp(dir, "new-*")
	if err != nil {
		return nil, "", err
	}
	// The number follows the process: two servers of one process have two records.
	number := strings.TrimPrefix(filepath.Base(f.Name()), "new-")
	path = filepath.Join(dir, fmt.Sprintf("%s.%d.%s.json", s.Store, s.PID, number))
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		_, err = f.Write(append(text, '\n'))
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return nil, "", errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	return f, path, nil
}

// Find returns the record of a running server of a store that this user started on this
// machine, and its token. found is false if there is none.
func Find(ctx context.Context, st *store.Store) (r Record, token string, found bool, err error) {
	name := cmp.Or(st.Copy, st.ID)
	dir, err := sockets.UserDir(serversName)
	if err != nil {
		return r, "", false, err
	}
	paths, err := filepath.Glob(filepath.Join(dir, name+".*.json"))
	if err != nil {
		return r, "", false, err
	}
	for _, path := range paths {
		r, alive, err := readRecord(path)
		if err != nil || !alive || r.Store != name || r.Location != st.Location {
			continue // of a process that has just ended, or of another copy
		}
		if token, err = readToken(filepath.Join(dir, name+".token")); err != nil {
			return r, "", false, err
		}
		if r.answers(ctx, token) {
			return r, token, true, nil
		}
	}
	return r, "", false, nil
}

// readRecord reads a record, and removes that of a server that was killed.
func readRecord(path string) (r Record, alive bool, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return r, false, err
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err == nil {
		return r, false, os.Remove(path)
	} else if !errors.Is(err, unix.EWOULDBLOCK) {
		return r, false, err
	}
	text, err := readPrivate(path)
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	return r, err == nil, err
}

// askTime bounds the question whether a server answers.
const askTime = 3 * time.Second

// answers reports whether the server of a record answers for its store.
func (r Record) answers(ctx context.Context, token string) bool {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(r.URL, "/")+Prefix+"/store", nil)
	if err != nil {
		return false
	}
	req.Header.Set("Authorization", "Bearer "+token)
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		// The record names the server of this user on this machine. Its certificate may be for
		// other names only.
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}, //nolint:gosec // see above
	}}
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	defer func() { _ = resp.Body.Close() }()
	var got Store
	return resp.StatusCode == http.StatusOK && json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&got) == nil
}
