package api

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/store/sockets"
)

// TestListen: an address that other machines can reach needs TLS.
func TestListen(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		l    Listen
		part string // of the error; empty: none
	}{
		{Listen{Address: "127.0.0.1:7700"}, ""},
		{Listen{Address: "localhost:0"}, ""},
		{Listen{Address: "[::1]:7700"}, ""},
		{Listen{Address: "127.0.0.1"}, "HOST:PORT"},
		{Listen{Address: "0.0.0.0:7700"}, "--http-cert"},
		{Listen{Address: ":7700"}, "--http-cert"},
		{Listen{Address: "[::]:7700"}, "--http-cert"},
		{Listen{Address: "train.example:7700"}, "--http-cert"},
		{Listen{Address: "127.0.0.1.example:7700"}, "--http-cert"},
		{Listen{Address: "0.0.0.0:7700", Cert: "c", Key: "k"}, ""},
		{Listen{Address: "127.0.0.1:7700", Cert: "c"}, "--http-key"},
	} {
		err := c.l.Validate()
		if (err == nil) != (c.part == "") || err != nil && (!strings.Contains(err.Error(), c.part) || !slices.Contains(problem.Kinds(err), problem.Invalid)) {
			t.Errorf("%+v: %v, want %q", c.l, err, c.part)
		}
	}
}

// TestUsersFile: only this user may be able to read it, and every line must be right.
func TestUsersFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "users")
	digest := fmt.Sprintf("%x", sha256.Sum256([]byte("secret")))
	write := func(text string, mode os.FileMode) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	write("# people\n\nada admin "+digest+"\nrosa reader "+strings.Repeat("0", 64)+"\n", 0o600)
	users, err := ReadUsers(path)
	if err != nil || len(users) != 2 || users[0].Name != "ada" || users[0].Role != Admin || users[1].Role != Reader {
		t.Fatalf("%v, %v", users, err)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer secret")
	if u, err := bearer(users, r); err != nil || u.Name != "ada" {
		t.Errorf("the token is of %v, %v", u, err)
	}
	for _, mode := range []os.FileMode{0o644, 0o640, 0o604, 0o660} {
		write("ada admin "+digest, mode)
		if _, err := ReadUsers(path); err == nil || !strings.Contains(err.Error(), "chmod 600") {
			t.Errorf("mode %v: %v", mode, err)
		}
	}
	for text, part := range map[string]string{
		"ada admin": "words", "ada root " + digest: "role", "a/b admin " + digest: "name", "ada admin abc": "SHA-256",
		"ada admin " + digest + "\nada reader " + digest: "already",
	} {
		write(text, 0o600)
		if _, err := ReadUsers(path); err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%q: %v, want %q", text, err, part)
		}
	}
}

// TestServe: a server can be found by other processes of its user while it runs, and its token
// is the same after it was started again.
func TestServe(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	if _, _, found, err := Find(t.Context(), h.st); err != nil || found {
		t.Fatalf("found a server: %v", err)
	}
	s, err := Serve(t.Context(), h.st, Listen{Address: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	r, token, found, err := Find(t.Context(), h.st)
	if err != nil || !found || r.URL != s.URL || r.PID != os.Getpid() || len(token) != 64 {
		t.Fatalf("found %v %+v, %v", found, r, err)
	}
	if link := s.Link("/runs/x"); link != s.URL+"#/runs/x?token="+token {
		t.Errorf("the link is %s", link)
	}
	if tunnel := s.Tunnel(); !strings.HasPrefix(tunnel, "ssh -L ") {
		t.Errorf("the tunnel is %s", tunnel)
	}
	base := strings.TrimSuffix(s.URL, "/")
	if r := h.callAt(t.Context(), base, "GET", Prefix+"/store", token, ""); r.status != http.StatusOK || !strings.Contains(r.body, `"role":"admin"`) {
		t.Errorf("the store: %d %s", r.status, r.body)
	}
	dir, err := sockets.UserDir(serversName)
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(dir, h.st.ID+"*"))
	if err != nil || len(files) != 2 {
		t.Errorf("files %v, %v", files, err)
	}
	for _, file := range files {
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", file, info.Mode(), err)
		}
	}
	// A stream does not keep the server from ending.
	ended := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+Prefix+"/stream", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_, err := resp.Body.Read(make([]byte, 1<<20))
		for err == nil {
			_, err = resp.Body.Read(make([]byte, 1<<20))
		}
		ended <- resp.Body.Close()
	}()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	http.DefaultClient.CloseIdleConnections()
	if _, _, found, err := Find(t.Context(), h.st); err != nil || found {
		t.Errorf("found a server that has ended: %v", err)
	}
	// The record of a killed server has no lock.
	stale := filepath.Join(dir, h.st.ID+".1.x.json")
	if err := os.WriteFile(stale, []byte(`{"store":"`+h.st.ID+`","location":"`+h.st.Location+`","url":"http://127.0.0.1:1/"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, found, err := Find(t.Context(), h.st); err != nil || found {
		t.Errorf("found a killed server: %v", err)
	}
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Errorf("the record of a killed server stays: %v", err)
	}
	s, err = Serve(t.Context(), h.st, Listen{Address: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	if s.token != token {
		t.Error("another token")
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestServeTLS: with a certificate, users of the file get in by the names in the certificate,
// and no request is answered without encryption.
func TestServeTLS(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	dir := t.TempDir()
	cert, key, pool := certificate(t, dir)
	users := filepath.Join(dir, "users")
	if err := os.WriteFile(users, fmt.Appendf(nil, "rosa reader %x\n", sha256.Sum256([]byte("secret"))), 0o600); err != nil {
		t.Fatal(err)
	}
	l := Listen{Address: "0.0.0.0:0", Cert: cert, Key: key, Users: users}
	if err := os.Chmod(key, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Serve(t.Context(), h.st, l); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Fatalf("a key that others can read: %v", err)
	}
	if err := os.Chmod(key, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := Serve(t.Context(), h.st, l)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	_, port, err := net.SplitHostPort(strings.TrimSuffix(strings.TrimPrefix(s.URL, "https://"), "/"))
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", "127.0.0.1:"+port)
		},
	}}
	ask := func(host, token string) int {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://train.example:"+port+Prefix+"/store", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		return resp.StatusCode
	}
	for _, c := range []struct {
		host, token string
		status      int
	}{{"train.example", "secret", 200}, {"train.example", "wrong", 401}, {"evil.example", "secret", 403}, {"train.example", s.token, 200}} {
		if got := ask(c.host, c.token); got != c.status {
			t.Errorf("host %s: %d, want %d", c.host, got, c.status)
		}
	}
	if r := h.callAt(t.Context(), "http://127.0.0.1:"+port, "GET", Prefix+"/store", "secret", ""); r.status != http.StatusBadRequest {
		t.Errorf("without encryption: %d %s", r.status, r.body)
	}
	if _, _, found, err := Find(t.Context(), h.st); err != nil || !found {
		t.Errorf("the server with TLS is not found: %v", err)
	}
}

// serveFor serves the store of a harness, with its reader as a user.
func (h *harness) serveFor(l Listen) {
	h.t.Helper()
	l.Address, l.Users = "127.0.0.1:0", filepath.Join(h.t.TempDir(), "users")
	if err := os.WriteFile(l.Users, fmt.Appendf(nil, "rosa reader %x\n", sha256.Sum256([]byte(readToken1))), 0o600); err != nil {
		h.t.Fatal(err)
	}
	s, err := Serve(h.t.Context(), h.st, l)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		if err := s.Close(); err != nil {
			h.t.Error(err)
		}
	})
	h.url = strings.TrimSuffix(s.URL, "/")
}

// dial connects to the server, for at most a minute.
func (h *harness) dial() net.Conn {
	h.t.Helper()
	c, err := (&net.Dialer{}).DialContext(h.t.Context(), "tcp", strings.TrimPrefix(h.url, "http://"))
	if err == nil {
		err = c.SetDeadline(time.Now().Add(time.Minute))
	}
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = c.Close() })
	return c
}

// TestServeDeafClient: a client that asks for assets and reads none is cut, and so is a client that never
// ends its body. A stream outlives the limit.
func TestServeDeafClient(t *testing.T) {
	t.Parallel()
	const limit = 300 * time.Millisecond
	h := newHarness(t, Options{})
	asset := make([]byte, 1<<20)
	h.serveFor(Listen{limit: limit, Page: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(asset) })})
	timeout := net.Error(nil)
	deaf, err := h.dial(), error(nil)
	for err == nil {
		_, err = fmt.Fprint(deaf, strings.Repeat("GET /asset HTTP/1.1\r\nHost: localhost\r\n\r\n", 400))
	}
	if asError(err, &timeout) && timeout.Timeout() {
		t.Error("a client that reads nothing was not cut")
	}
	slow := h.dial()
	fmt.Fprintf(slow, "POST %s/runs/bert:stop HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Length: 100\r\n\r\n", Prefix, readToken1)
	if _, err := io.Copy(io.Discard, slow); asError(err, &timeout) && timeout.Timeout() {
		t.Error("a client that sends no body was not cut")
	}
	start, seen := time.Now(), false
	if err := h.follow(t.Context(), "", func(message) bool {
		if seen = time.Since(start) > 4*limit; !seen {
			h.record("r", "main", &events.JobStarted{Job: store.NewID()})
		}
		return !seen
	}); err != nil || !seen {
		t.Errorf("the stream ended after %s: %v", time.Since(start), err)
	}
}

// TestServeConnections: connections above the limit wait until others end, and do not keep the
// server from ending.
func TestServeConnections(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	h.serveFor(Listen{most: 2})
	ask := func(c net.Conn) {
		t.Helper()
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
	}
	read := func(c net.Conn) {
		t.Helper()
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(line, "200") {
			t.Errorf("%q, %v", line, err)
		}
	}
	first, second, third := h.dial(), h.dial(), h.dial()
	for _, c := range []net.Conn{first, second} {
		ask(c)
		read(c)
	}
	ask(third)
	if err := third.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	timeout := net.Error(nil)
	if _, err := third.Read(make([]byte, 1)); !asError(err, &timeout) || !timeout.Timeout() {
		t.Errorf("the third connection was answered: %v", err)
	}
	if err := errors.Join(first.Close(), third.SetReadDeadline(time.Now().Add(time.Minute))); err != nil {
		t.Fatal(err)
	}
	read(third)
	ask(h.dial()) // waits until the end
}

// certificate makes a certificate for train.example.
func certificate(t *testing.T, dir string) (cert, key string, pool *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	of := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"train.example"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, of, of, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	cert, key, pool = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"), x509.NewCertPool()
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if parsed, err := x509.ParseCertificate(der); err == nil {
		pool.AddCert(parsed)
	}
	return cert, key, pool
}
