package store

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/logpeers"
	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/signing"
	"github.com/ckptstore/ckptstore/internal/store/sockets"
	"github.com/ckptstore/ckptstore/internal/store/views"
)

// dialURL connects to the server of a URL. Without a token it uses the token that an owner on
// this machine has made for its user.
func dialURL(ctx context.Context, url string, a *Access, o jetlog.Options) (*jetlog.Log, error) {
	if a == nil {
		env := AccessFromEnv()
		a = &env
	}
	if err := a.client(&o); err != nil {
		return nil, err
	}
	o.URL = url
	hint := ""
	if o.Token == "" {
		search := sockets.SearchToken(url)
		if err := search.Apply(&o); o.FindToken == nil {
			hint = search.Hint(err)
		}
	}
	log, err := jetlog.Connect(ctx, o)
	if errors.Is(err, jetlog.ErrNotAllowed) {
		return nil, fmt.Errorf("%w; $%s or $%s is the token, $%s the CA that verifies the server, $%s and $%s this client's certificate%s",
			err, EnvToken, EnvTokenFile, EnvTLSCA, EnvTLSCert, EnvTLSKey, hint)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoStore, err)
	}
	return log, nil
}

// findArchive sets the archive of a log that was sealed: below the directory that its owner
// serves, which this machine has under the same path.
func findArchive(ctx context.Context, log *jetlog.Log) error {
	sealed, err := log.Sealed(ctx)
	if errors.Is(err, jetlog.ErrNoLog) || err == nil && sealed.Last == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	served, err := log.Served(ctx)
	if err != nil {
		return err
	}
	if id, err := readIdentity(served.Directory); err != nil || id.Store != served.Store { // not even store.json is there
		return fmt.Errorf("the old part of the log is in files of %s, served by %s from there: %w: mount that directory on this machine under the same path; a store whose log is on a NATS server needs none",
			served.Directory, served.Host, os.ErrNotExist)
	}
	log.UseArchive(archiveDir(served.Directory))
	return nil
}

// openURL connects to a NATS server, or to the owner of a directory that listens. It folds the
// views in memory.
func openURL(ctx context.Context, o Options) (_ *Store, err error) {
	how := jetlog.Options{Logger: o.Logger, InOrder: o.dir != ""}
	if o.Reader {
		how.ReadOnly = errReading
	}
	s := &Store{opts: o, signs: signing.NewGate("", o.Signer)}
	how.Sign = s.signs.Sign
	log, err := dialURL(ctx, o.Location, o.Access, how)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	defer func() {
		if err != nil {
			err = damage(err)
			log.Close()
		}
	}()
	if err := findArchive(ctx, log); err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	created, _, err := log.Open(ctx)
	if errors.Is(err, jetlog.ErrNoLog) {
		return nil, fmt.Errorf("%w at %s: %w; start the server as it was, or, if there never was a store, make one with `ckptstore init --store URL --data DIR`",
			ErrNoStore, jetlog.Redacted(o.Location), err)
	}
	if err != nil {
		return nil, err
	}
	if err := checkLog(ctx, log, created.Store); err != nil {
		return nil, err
	}
	s.ID, s.Location, s.formerly = created.Store, jetlog.Redacted(o.Location), created.Formerly
	s.useLog(log)
	if s.runtime, err = sockets.Hold(created.Store); err != nil {
		return nil, unusable(err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.runtime.Release())
		}
	}()
	s.Runtime = s.runtime.Path
	if !o.Reader {
		if err := sockets.SweepJobs(s.Runtime); err != nil {
			return nil, fmt.Errorf("open store: %w", err)
		}
		sockets.SweepOthers(s.Runtime, o.Logger)
	}
	at, err := locate(ctx, log, created)
	if err != nil {
		return nil, err
	}
	if o.dir != "" {
		at.dir = o.dir
	}
	if at.bucket == "" {
		id, err := at.probe(o.Reader)
		if err != nil {
			return nil, err
		}
		s.Copy = id.Copy
	} else if id, err := readIdentity(at.dir); at.dir == "" || err != nil || id.Store != s.ID {
		at.dir = "" // the owner's directory is not on this machine, and nothing in it is needed
	}
	if at.owned && at.dir != "" {
		log.UseArchive(archiveDir(at.dir)) // the owner may cut the log later
	}
	if err := s.openData(at.dir, at.bucket); err != nil {
		return nil, err
	}
	if err := s.checkBucket(ctx); err != nil {
		return nil, err
	}
	if _, err := recorded(ctx, s, log); err != nil {
		return nil, err
	}
	if s.followed, err = views.Open(ctx, s.viewsOf("", log)); err != nil {
		return nil, err
	}
	s.local = s.followed.Source()
	defer func() {
		if err != nil {
			s.end()
			s.leasing.Wait()
			err = errors.Join(err, s.followed.Close())
		}
	}()
	if at.owned && o.Listen != nil {
		return nil, fmt.Errorf("%w: %s is served by the owner of %s already: clients connect to it", ErrLocation, jetlog.Redacted(o.Location), at.dir)
	}
	if at.owned || o.Reader {
		return s, nil
	}
	// A server's store has no owner: each process that opens it does an owner's work.
	if err := repairAll(ctx, s, log, s.followed.View, 0, unpaced); err != nil {
		return nil, err
	}
	if !o.LeaveVoids {
		s.leasing.Go(func() { s.recordVoids(s.life, log, s.followed) })
	}
	if o.Listen != nil {
		if s.relay, err = s.startRelay(ctx); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// relay lets clients connect to the log of a server's store.
type relay struct {
	*jetlog.Relay
	token *sockets.Token // that clients show; nil if this process did not make it
}

// openPeers opens a store whose log has several copies: through the trainers that serve
// them, or else by serving the copies in this process until the store is closed.
func openPeers(ctx context.Context, o Options, dir string) (*Store, error) {
	if o.Listen != nil {
		return nil, fmt.Errorf("open store %s: %w: its log has copies that the trainers of its jobs serve: it has no other address", dir, ErrLocation)
	}
	o.dir = dir
	at, err := logpeers.Find(ctx, dir)
	if errors.Is(err, logpeers.ErrCopied) {
		return nil, fmt.Errorf("open store %s: %w", dir, err)
	}
	if !exists(filepath.Join(dir, markName)) {
		return nil, fmt.Errorf("%w: the log of %s, of which %s is a part, has not formed: start the job with --log-replicas 3 on its first three nodes; if none ever ran, remove %s for a store whose log has one copy",
			ErrNoStore, dir, filepath.Join(dir, "join", "log"), filepath.Join(dir, "join", "log"))
	}
	if err == nil {
		var s *Store
		o.Location, o.Access = at.URL, &Access{Token: at.Token, TLS: at.TLS}
		if s, err = openURL(ctx, o); err == nil {
			s.Location = dir
		}
		if err == nil || !errors.Is(err, ErrNoStore) {
			return s, err
		}
	}
	if o.Served {
		return nil, fmt.Errorf("open store: %w", err)
	}
	local, here, lerr := logpeers.Serve(ctx, dir, o.Patience, o.Logger)
	if lerr != nil {
		return nil, fmt.Errorf("open store: %w (and no trainer serves them: %w)", lerr, err)
	}
	o.Location, o.Access = here.URL, &Access{Token: here.Token, TLS: here.TLS}
	s, err := openURL(ctx, o)
	if err != nil {
		local.Close()
		return nil, err
	}
	s.copies, s.Location = local, dir
	return s, nil
}

// startRelay listens at the address in the options.
func (s *Store) startRelay(ctx context.Context) (*relay, error) {
	r, addr, err := s.Log.Relay(ctx, jetlog.RelayOptions{Listen: *s.opts.Listen, Signed: s.signs.Admit})
	if err != nil {
		return nil, err
	}
	own := &relay{Relay: r}
	if s.opts.sharing {
		if own.token, err = sockets.ShareToken(addr.String(), s.opts.Listen.Token); err != nil {
			return nil, errors.Join(err, own.close())
		}
	}
	if s.opts.Bound != nil {
		s.opts.Bound(addr)
	}
	return own, nil
}

// close ends the connections of all clients.
func (r *relay) close() error {
	r.Close()
	if r.token != nil {
		return r.token.Withdraw()
	}
	return nil
}

// Environment of a server's clients. The token of a worker has another name: a worker's token is
// valid only for its trainer's socket.
const (
	EnvToken     = "CKPTSTORE_STORE_TOKEN"      // the token itself
	EnvTokenFile = "CKPTSTORE_STORE_TOKEN_FILE" // or a file that holds it
	EnvTLSCA     = "CKPTSTORE_TLS_CA"           // certificates that verify the server
	EnvTLSCert   = "CKPTSTORE_TLS_CERT"         // this client's certificate
	EnvTLSKey    = "CKPTSTORE_TLS_KEY"          // and its key
)

// ErrAccess reports an unusable token, certificate or key.
var ErrAccess = problem.New(problem.Invalid, "bad credentials")

// Access holds the credentials of one side of a connection, and how it verifies the other side.
// Certificates and keys are PEM files.
type Access struct {
	Token     string      // has precedence over TokenFile
	TokenFile string      // readable only by its user
	CA        string      // verifies the other side's certificate; "" means the machine's CAs, for a server none
	Cert, Key string      // both or neither
	TLS       *tls.Config // of a client, in place of CA, Cert and Key

	Clients front.Clients // of a server: those with tokens of their own; nil: none
}

// AccessFromEnv returns this process's credentials for servers from the environment.
func AccessFromEnv() Access {
	return Access{
		Token: os.Getenv(EnvToken), TokenFile: os.Getenv(EnvTokenFile),
		CA: os.Getenv(EnvTLSCA), Cert: os.Getenv(EnvTLSCert), Key: os.Getenv(EnvTLSKey),
	}
}

// Client returns the token and the TLS configuration of a client; nil: that of the machine.
func (a Access) Client() (token string, c *tls.Config, err error) {
	var o jetlog.Options
	err = a.client(&o)
	return o.Token, o.TLS, err
}

// Whoami asks the owner of a store, or a gateway, at a URL who this process is. It opens no
// store.
func Whoami(ctx context.Context, url string) (front.Who, error) {
	log, err := dialURL(ctx, url, nil, jetlog.Options{ReadOnly: errReading})
	if err != nil {
		return front.Who{}, err
	}
	defer log.Close()
	return log.Whoami(ctx)
}

// client sets a client's credentials in o.
func (a Access) client(o *jetlog.Options) (err error) {
	if o.Token, err = a.token(); err != nil {
		return err
	}
	if a.TLS != nil {
		o.TLS = a.TLS
		return nil
	}
	if a == (Access{Token: a.Token, TokenFile: a.TokenFile}) {
		return nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.RootCAs, err = pool(a.CA); err != nil {
		return err
	}
	if c.Certificates, err = a.pair(); err != nil {
		return err
	}
	o.TLS = c
	return nil
}

// Listen returns a server's listening address and credentials. On loopback it may ask clients for
// nothing: then [Open] makes a token.
func (a Access) Listen(address string) (*jetlog.Listen, error) {
	l := &jetlog.Listen{Address: address, Clients: a.Clients}
	var err error
	if l.Token, err = a.token(); err != nil {
		return nil, err
	}
	certs, err := a.pair()
	switch {
	case err != nil:
		return nil, err
	case certs != nil:
		l.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: certs}
	case a.CA != "":
		return nil, fmt.Errorf("%w: a CA for client certificates needs a certificate and key of the server too", ErrAccess)
	}
	if a.CA != "" {
		if l.TLS.ClientCAs, err = pool(a.CA); err != nil {
			return nil, err
		}
		l.TLS.ClientAuth = tls.RequireAndVerifyClientCert
	}
	with, _ := sockets.WithToken(*l) // as the owner does
	return l, with.Validate()
}

func (a Access) token() (string, error) {
	token := []byte(a.Token)
	if a.Token == "" && a.TokenFile != "" {
		text, err := secret("token", a.TokenFile)
		if err != nil {
			return "", err
		}
		if token = bytes.TrimSpace(text); len(token) == 0 {
			return "", fmt.Errorf("%w: token file %s is empty: `openssl rand -hex 32` makes a token", ErrAccess, a.TokenFile)
		}
	}
	for _, c := range token {
		if c <= ' ' || c > '~' {
			return "", fmt.Errorf("%w: the token has a space, a line break or a character that is not ASCII: `openssl rand -hex 32` makes a good one", ErrAccess)
		}
	}
	return string(token), nil
}

// secret reads a file that no other user may read.
func secret(what, path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrAccess, what, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrAccess, what, err)
	}
	const most = 1 << 20
	if !info.Mode().IsRegular() || info.Size() > most {
		return nil, fmt.Errorf("%w: %s %s is not a file of at most %d bytes", ErrAccess, what, path, most)
	}
	next := fmt.Sprintf("chmod 600 %s, and make a new %s if another user may have read it", path, what)
	if err := private.Secret(path, info, next); err != nil {
		return nil, fmt.Errorf("%w: %s file %w", ErrAccess, what, err)
	}
	text := make([]byte, info.Size())
	if _, err := f.ReadAt(text, 0); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrAccess, what, err)
	}
	return text, nil
}

// pair returns the certificate and its key, nil without them.
func (a Access) pair() ([]tls.Certificate, error) {
	switch {
	case a.Cert == "" && a.Key == "":
		return nil, nil
	case a.Cert == "" || a.Key == "":
		return nil, fmt.Errorf("%w: a certificate needs its key, and a key its certificate: give both", ErrAccess)
	}
	cert, err := os.ReadFile(a.Cert)
	if err != nil {
		return nil, fmt.Errorf("%w: certificate: %w", ErrAccess, err)
	}
	key, err := secret("key", a.Key)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%w: certificate %s with key %s: %w", ErrAccess, a.Cert, a.Key, err)
	}
	return []tls.Certificate{pair}, nil
}

// pool returns the certificates in a file, nil without one.
func pool(path string) (*x509.CertPool, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%w: CA: %w", ErrAccess, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%w: CA %s has no certificate in PEM", ErrAccess, path)
	}
	return pool, nil
}
