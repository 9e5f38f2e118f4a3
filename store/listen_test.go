package store

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/web"
)

var secretToken = strings.Repeat("0a1b", 16)

// listening opens a store that lets clients in, and returns its address.
func listening(t *testing.T, dir string, l *jetlog.Listen) (*Store, string) {
	t.Helper()
	bound := make(chan net.Addr, 1)
	s, err := Open(t.Context(), Options{Location: dir, Listen: l, Bound: func(a net.Addr) { bound <- a }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(t, s) })
	if !s.Owns() {
		t.Fatal("it does not own the store")
	}
	return s, (<-bound).String()
}

// TestServed works in a directory over TCP, through one owner and the next.
func TestServed(t *testing.T) {
	t.Parallel()
	dir := made(t)
	access := &Access{Token: secretToken}
	owner, addr := listening(t, dir, &jetlog.Listen{Address: "127.0.0.1:0", Token: secretToken})
	if c, err := readCard(dir); err != nil || c.Address != addr {
		t.Errorf("owner.json says %+v, %v, the address is %s", c, err, addr)
	}
	url := "nats://" + addr
	remote, err := Open(t.Context(), Options{Location: url, Access: access})
	if err != nil {
		t.Fatal(err)
	}
	defer shut(t, remote)
	if remote.ID != owner.ID || remote.DataDir != filepath.Join(dir, "data") || remote.Owns() {
		t.Errorf("opened %s with data in %s, owned: %v", remote.ID, remote.DataDir, remote.Owns())
	}
	committed(t, remote, "run", 1)
	sees := func(s *Store, n int) {
		t.Helper()
		all, err := web.Ask(t.Context(), s.Views(), web.Checkpoints, web.Params{Run: "run", Trial: trialName, All: true})
		if err != nil || len(all) != n {
			t.Errorf("%d checkpoints, %v, want %d", len(all), err, n)
		}
	}
	sees(owner, 1)
	committed(t, owner, "run", 2)
	sees(remote, 2)
	if a, b := digest(t, owner), digest(t, remote); a != b {
		t.Errorf("the owner's views have digest %s, the client's %s", a, b)
	}

	// Another process stands by, and listens when it is its turn.
	bound := make(chan net.Addr, 1)
	next, err := Open(t.Context(), Options{
		Location: dir, Listen: &jetlog.Listen{Address: addr, Token: secretToken}, Bound: func(a net.Addr) { bound <- a },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer shut(t, next)
	shut(t, owner)
	if got := (<-bound).String(); got != addr {
		t.Errorf("the next owner listens on %s", got)
	}
	committed(t, remote, "run", 3)
	sees(next, 3)
	if c, err := readCard(dir); err != nil || c.Address != addr {
		t.Errorf("owner.json says %+v, %v", c, err)
	}
}

// TestAnotherAtTheAddress: a client that comes back to its address and finds
// another store there writes nothing to it.
func TestAnotherAtTheAddress(t *testing.T) {
	t.Parallel()
	owner, addr := listening(t, made(t), &jetlog.Listen{Address: "127.0.0.1:0"})
	remote := openWith(t, Options{Location: "nats://" + addr, Access: &Access{}})
	defer func() { // its views may have found out too
		if err := remote.Close(); err != nil && !errors.Is(err, jetlog.ErrForeign) {
			t.Error(err)
		}
	}()
	must(t, remote, "run", begun("step-1"))
	shut(t, owner)
	other, _ := listening(t, made(t), &jetlog.Listen{Address: addr})
	before, err := other.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	fact, err := metrics("late", "run", 1)
	if err != nil {
		t.Fatal(err)
	}
	_, err = remote.Log.Append(t.Context(), fact)
	wrong(t, err, jetlog.ErrForeign)
	_, err = decide(t.Context(), remote, "run", begun("step-2"))
	wrong(t, err, jetlog.ErrForeign)
	if after, err := other.Log.Last(t.Context()); err != nil || after != before {
		t.Errorf("the other store had %d events and has %d, %v", before, after, err)
	}
}

// TestNotLetIn: who is refused is told why, and what to set.
func TestNotLetIn(t *testing.T) {
	t.Parallel()
	certs := certificates(t)
	listen, err := (Access{Token: secretToken, Cert: certs["server.pem"], Key: certs["server.key"]}).Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, addr := listening(t, made(t), listen)
	for name, tc := range map[string]struct {
		scheme string
		access Access
		says   string // "" for who is let in
	}{
		"good":          {"tls", Access{Token: secretToken, CA: certs["ca.pem"]}, ""},
		"wrong token":   {"tls", Access{Token: secretToken + "x", CA: certs["ca.pem"]}, "does not know this token"},
		"no token":      {"tls", Access{CA: certs["ca.pem"]}, "none was given"},
		"wrong CA":      {"tls", Access{Token: secretToken, CA: certificates(t)["ca.pem"]}, "CA that is not trusted"},
		"no CA":         {"tls", Access{Token: secretToken}, "CA that is not trusted"},
		"plain":         {"nats", Access{Token: secretToken}, "CA that is not trusted"},
		"nats URL good": {"nats", Access{Token: secretToken, CA: certs["ca.pem"]}, ""},
	} {
		begin := time.Now()
		s, err := Open(t.Context(), Options{Location: tc.scheme + "://" + addr, Access: &tc.access})
		if tc.says == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			shut(t, s)
			continue
		}
		if err == nil {
			shut(t, s)
		}
		wrong(t, err, jetlog.ErrNotAllowed, tc.says, addr, EnvToken, EnvTLSCA)
		if errors.Is(err, ErrNoStore) || err != nil && strings.Contains(err.Error(), secretToken) || time.Since(begin) > 5*time.Second {
			t.Errorf("%s: %v after %s", name, err, time.Since(begin))
		}
		_, err = InitURL(t.Context(), tc.scheme+"://"+addr, URLOptions{Data: t.TempDir(), Access: &tc.access})
		wrong(t, err, jetlog.ErrNotAllowed, tc.says)
	}
}

// TestElsewhere: the data of a served directory is looked for under its path,
// where another store or nothing may be.
func TestElsewhere(t *testing.T) {
	t.Parallel()
	dir := made(t)
	_, addr := listening(t, dir, &jetlog.Listen{Address: "127.0.0.1:0"})
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Location: "nats://" + addr, Access: &Access{}}
	if _, err := InitURL(t.Context(), o.Location, URLOptions{Data: t.TempDir(), Access: o.Access}); !errors.Is(err, ErrExists) {
		t.Errorf("another store on the same log: %v", err)
	}
	// What this machine would see there. The server itself has its log open.
	path := filepath.Join(dir, "store.json")
	mine := read(t, path)
	remove(t, dir, "store.json")
	refused(t, o, os.ErrNotExist, dir, host, "nothing there says", "mount it", "same path")
	write(t, path, read(t, filepath.Join(made(t), "store.json")))
	refused(t, o, ErrForeign, dir, "not of")
	write(t, path, mine)
	shut(t, openWith(t, o))
}

func openWith(t *testing.T, o Options) *Store {
	t.Helper()
	s, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestAccess reads tokens, certificates and keys.
func TestAccess(t *testing.T) {
	t.Parallel()
	certs := certificates(t)
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(path, []byte(text), 0o600), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := file("token", secretToken+"\n", 0o600)
	key := file("key", read(t, certs["server.key"]), 0o644)
	const local, far = "127.0.0.1:0", "0.0.0.0:0"
	for name, tc := range map[string]struct {
		access  Access
		address string
		is      error // nil for what is good
		says    string
	}{
		"a file":             {Access{TokenFile: good}, local, nil, ""},
		"the environment":    {Access{Token: secretToken, TokenFile: "/nowhere"}, local, nil, ""},
		"TLS and token":      {Access{TokenFile: good, Cert: certs["server.pem"], Key: certs["server.key"]}, far, nil, ""},
		"mutual TLS":         {Access{CA: certs["ca.pem"], Cert: certs["server.pem"], Key: certs["server.key"]}, far, nil, ""},
		"group readable":     {Access{TokenFile: file("group", secretToken, 0o640)}, local, ErrAccess, "chmod 600"},
		"world readable":     {Access{TokenFile: file("world", secretToken, 0o604)}, local, ErrAccess, "chmod 600"},
		"group writable":     {Access{TokenFile: file("writable", secretToken, 0o620)}, local, ErrAccess, "chmod 600"},
		"no file":            {Access{TokenFile: filepath.Join(dir, "none")}, local, os.ErrNotExist, "none"},
		"a directory":        {Access{TokenFile: dir}, local, ErrAccess, "not a file"},
		"an empty file":      {Access{TokenFile: file("empty", "\n", 0o600)}, local, ErrAccess, "openssl"},
		"two lines":          {Access{TokenFile: file("two", secretToken+"\n"+secretToken, 0o600)}, local, ErrAccess, "line break"},
		"a short token":      {Access{Token: "short"}, local, jetlog.ErrExposed, "openssl"},
		"key readable":       {Access{Cert: certs["server.pem"], Key: key}, local, ErrAccess, "chmod 600"},
		"no key":             {Access{Cert: certs["server.pem"]}, local, ErrAccess, "give both"},
		"key of another":     {Access{Cert: certs["server.pem"], Key: certs["ca.key"]}, local, ErrAccess, "server.pem"},
		"no PEM":             {Access{CA: good, Cert: certs["server.pem"], Key: certs["server.key"]}, local, ErrAccess, "PEM"},
		"CA alone":           {Access{CA: certs["ca.pem"]}, local, ErrAccess, "certificate and key"},
		"far without TLS":    {Access{TokenFile: good}, far, jetlog.ErrExposed, "in clear"},
		"far without secret": {Access{Cert: certs["server.pem"], Key: certs["server.key"]}, far, jetlog.ErrExposed, "token"},
	} {
		l, err := tc.access.Listen(tc.address)
		if tc.is == nil {
			if err != nil || l.Token != "" && l.Token != secretToken {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		wrong(t, err, tc.is, tc.says)
		if err != nil && strings.Contains(err.Error(), secretToken) {
			t.Errorf("%s: %v says the token", name, err)
		}
	}
}

// TestAccessFromEnv: clients are configured by the environment.
func TestAccessFromEnv(t *testing.T) {
	_, addr := listening(t, made(t), &jetlog.Listen{Address: "127.0.0.1:0", Token: secretToken})
	refused(t, Options{Location: "nats://" + addr}, jetlog.ErrNotAllowed)
	t.Setenv(EnvToken, secretToken)
	shut(t, openWith(t, Options{Location: "nats://" + addr}))
	path := filepath.Join(t.TempDir(), "token")
	write(t, path, secretToken+"\n")
	t.Setenv(EnvToken, "")
	t.Setenv(EnvTokenFile, path)
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	refused(t, Options{Location: "nats://" + addr}, ErrAccess, "chmod 600")
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	shut(t, openWith(t, Options{Location: "nats://" + addr}))
}

// TestPortTaken: a store that cannot listen is given up again.
func TestPortTaken(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dir := made(t)
	refused(t, Options{Location: dir, Listen: &jetlog.Listen{Address: l.Addr().String()}}, nil, l.Addr().String(), "in use")
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	shut(t, open(t, dir))
}

// certificates are the paths of a CA and of a certificate that it has signed.
func certificates(t *testing.T) map[string]string {
	t.Helper()
	dir := t.TempDir()
	paths := map[string]string{}
	save := func(name, kind string, der []byte) {
		t.Helper()
		paths[name] = filepath.Join(dir, name)
		if err := os.WriteFile(paths[name], pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var ca *x509.Certificate
	var caKey *ecdsa.PrivateKey
	for i, name := range []string{"ca", "server"} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		cert := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: fmt.Sprint("test ", name)},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			IsCA: ca == nil, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
			IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		}
		if ca == nil {
			ca, caKey = cert, key
		}
		der, err := x509.CreateCertificate(rand.Reader, cert, ca, &key.PublicKey, caKey)
		if err != nil {
			t.Fatal(err)
		}
		secretKey, err := x509.MarshalECPrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		save(name+".pem", "CERTIFICATE", der)
		save(name+".key", "EC PRIVATE KEY", secretKey)
	}
	return paths
}

// TestInitCut: an init on a server that was cut before it had marked the data
// location is finished by the next, and one on a location in use is refused.
func TestInitCut(t *testing.T) {
	t.Parallel()
	url, srv := server(t)
	data := t.TempDir()
	o := URLOptions{Data: data, Access: &Access{}}
	first, err := InitURL(t.Context(), url, o)
	if err != nil || first.Replicas != 1 {
		t.Fatal(first, err)
	}
	remove(t, data, markName)
	refused(t, Options{Location: url}, os.ErrNotExist, data, "nothing there says")
	second, err := InitURL(t.Context(), url, o)
	if err != nil || second != first {
		t.Fatalf("made %+v, then %+v, %v", first, second, err)
	}
	if _, err := InitURL(t.Context(), url, o); !errors.Is(err, ErrExists) {
		t.Errorf("once more: %v", err)
	}
	shut(t, open(t, url))
	// Another server with the same data: that of the first is not at hand.
	empty, other := server(t)
	_, err = InitURL(t.Context(), empty, o)
	wrong(t, err, ErrExists, first.Store, data, "key")
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	log, err := jetlog.Connect(ctx, jetlog.Options{URL: empty})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := log.Open(ctx); !errors.Is(err, jetlog.ErrNoLog) {
		t.Errorf("a refused init made a log: %v", err)
	}
	log.Close()
	for n, says := range map[int]string{2: "3 or 5", 7: "3 or 5", -1: "3 or 5", 3: "as many servers"} {
		_, err := InitURL(t.Context(), empty, URLOptions{Data: t.TempDir(), Replicas: n, Access: &Access{}})
		wrong(t, err, nil, says)
	}
	srv.end()
	other.end()
}

// TestTwoServers: one log directory is never served twice, by a process with
// the store's lock or without.
func TestTwoServers(t *testing.T) {
	t.Parallel()
	dir := made(t)
	log := filepath.Join(dir, "log")
	again := func() error {
		s, err := jetlog.StartServer(t.Context(), jetlog.ServerOptions{Dir: log})
		if err == nil {
			s.Shutdown()
		}
		return err
	}
	_, first := serverIn(t, log)
	wrong(t, again(), jetlog.ErrServed, log)
	// Who has the store's lock, but not that of the log, is no owner either.
	refused(t, Options{Location: dir, Patience: 100 * time.Millisecond}, jetlog.ErrServed, log)
	first.kill()
	owner := actors(t, dir, 1)[0]
	wrong(t, again(), jetlog.ErrServed, log)
	must(t, open(t, dir), "run", begun("step-1"))
	owner.kill()
	if err := again(); err != nil {
		t.Error(err)
	}
}
