package front

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"regexp"
	"strings"
	"time"
)

// Principal is the identity of a client, as the owner names it:
//
//	token        it has shown the token, which several may have
//	user:alice   it has shown a token of this user
//	cert:alice   it has shown a certificate of this name
//	uid:1000     it is a process of this user
type Principal struct {
	Name string
	// Personal reports that all clients with the name are one person, so that one
	// session may take what another one holds.
	Personal bool
}

var byToken = Principal{Name: "token"}

// userPrincipal matches the names of users.
var userPrincipal = regexp.MustCompile(`^user:[A-Za-z0-9._-]{1,64}$`)

// OfUser returns the principal of a process of this machine.
func OfUser(uid uint32) Principal {
	return Principal{Name: fmt.Sprintf("uid:%d", uid), Personal: true}
}

// principalName is the maximum length of a certificate's name that is used
// unchanged.
const principalName = 64

// ofCertificate returns the principal of a verified certificate: its common name,
// or else its first alternative name. A name that does not fit in a short header
// is replaced by its digest.
func ofCertificate(c *x509.Certificate) Principal {
	names := []string{c.Subject.CommonName}
	names = append(names, c.DNSNames...)
	names = append(names, c.EmailAddresses...)
	for _, u := range c.URIs {
		names = append(names, u.String())
	}
	name := ""
	for _, n := range names {
		if n != "" {
			name = n
			break
		}
	}
	plain := name != "" && len(name) <= principalName && name == strings.TrimSpace(name) && !strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r > '~' })
	if !plain || strings.HasPrefix(name, "sha256:") {
		sum := sha256.Sum256(c.Raw)
		name = "sha256:" + hex.EncodeToString(sum[:16])
	}
	return Principal{Name: "cert:" + name, Personal: true}
}

// ofTLS returns the principal of the client's certificate, if it was verified.
func ofTLS(state tls.ConnectionState) (Principal, bool) {
	if len(state.VerifiedChains) == 0 {
		return Principal{}, false
	}
	return ofCertificate(state.VerifiedChains[0][0]), true
}

// connect is the part of a client's CONNECT that counts. Other members are
// ignored: a claimed name is no identity.
type connect struct {
	Token        string `json:"auth_token"`
	User         string `json:"user"`
	Verbose      bool   `json:"verbose"`
	Pedantic     bool   `json:"pedantic"`
	Headers      bool   `json:"headers"`
	NoResponders bool   `json:"no_responders"`
}

// errAuthorization is the server's own text.
const errAuthorization = protocolError("Authorization Violation")

// greet admits a client: INFO, TLS, CONNECT. When it returns, the server is
// connected, and the client is authenticated.
func (s *session) greet() error {
	if err := s.client.SetDeadline(time.Now().Add(s.f.limits.Greeting)); err != nil {
		return err
	}
	if s.door.Who != nil {
		var err error
		if s.principal, err = s.door.Who(s.client); err != nil {
			return err
		}
	}
	if err := s.sayInfo(); err != nil {
		return err
	}
	certified := false
	if s.door.TLS != nil {
		secure := tls.Server(s.client, s.door.TLS)
		ctx, cancel := context.WithTimeout(s.f.life, s.f.limits.Greeting)
		err := secure.HandshakeContext(ctx)
		cancel()
		if err != nil {
			return fmt.Errorf("TLS: %w", err)
		}
		s.mu.Lock()
		s.client = secure
		s.mu.Unlock()
		s.principal, certified = ofTLS(secure.ConnectionState())
	}
	s.in = newReader(s.client, s.f.limits)
	s.in.charge = s.charge
	s.out = newOutput(s.client, s.f.limits.Write)
	c, err := s.in.connect()
	if err != nil {
		return err
	}
	user, unknown := s.ofToken(c.Token)
	if unknown != nil && !s.door.admits(c.Token) {
		return whyNot(unknown)
	}
	switch {
	case s.door.TLS != nil && s.door.TLS.ClientAuth == tls.RequireAndVerifyClientCert && !certified:
		return errAuthorization
	case unknown == nil:
		s.principal = Principal{Name: "user:" + user.Name, Personal: true}
		s.door.Grant, s.judge.grant = user.Grant, user.Grant
	case s.principal.Name == "" && s.door.Token != "":
		s.principal = byToken
	case s.principal.Name == "":
		return whyNot(unknown) // the client has no identity
	}
	if c.Verbose || c.Pedantic || !c.Headers {
		return protocolError("clients of this server are neither verbose nor pedantic, and know headers")
	}
	s.f.known(s)
	return s.connectServer(c.NoResponders)
}

// admits reports whether a token is the door's own. Without one, a door needs none, unless it
// knows clients by tokens of their own: then a certificate alone admits no client, because it has
// no role, and is not revoked with the user's tokens. It compares digests, which have one
// length: the time reveals nothing of the token's.
func (d Door) admits(shown string) bool {
	if d.Token == "" {
		return d.Clients == nil
	}
	want, got := sha256.Sum256([]byte(d.Token)), sha256.Sum256([]byte(shown))
	return subtle.ConstantTimeCompare(want[:], got[:]) == 1
}

// sayInfo sends the server's INFO, adapted to the front.
func (s *session) sayInfo() error {
	info := maps.Clone(s.f.info)
	for _, not := range []string{"connect_urls", "ws_connect_urls", "nonce", "client_ip", "client_id", "ip", "host", "port", "tls_available", "tls_verify"} {
		delete(info, not)
	}
	info["max_payload"] = s.f.limits.Payload
	info["auth_required"] = s.door.Token != "" || s.door.Clients != nil
	info["tls_required"] = s.door.TLS != nil
	text, err := json.Marshal(info)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(s.client, "INFO %s\r\n", text)
	return err
}

// connectServer opens the session's connection to the server.
func (s *session) connectServer(noResponders bool) error {
	server, err := s.f.o.Dial()
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.server = server
	ended := s.ended
	s.mu.Unlock()
	if ended {
		_ = server.Close()
		return net.ErrClosed
	}
	s.from = newReader(server, s.f.limits)
	if _, err := serverInfo(s.from, server, s.f.limits); err != nil {
		return err
	}
	say := map[string]any{
		"verbose": false, "pedantic": false, "echo": true, "headers": true, "no_responders": noResponders,
		"protocol": 0, "lang": "go", "version": "1", "name": s.principal.Name,
	}
	if s.f.o.Credentials != nil {
		for name, value := range s.f.o.Credentials() {
			say[name] = value
		}
	}
	hello, err := json.Marshal(say)
	if err != nil {
		return err
	}
	s.to = newOutput(server, s.f.limits.Write)
	return s.to.send([]byte("CONNECT " + string(hello) + "\r\n"))
}

// serverInfo reads the first line of a server.
func serverInfo(r *reader, conn net.Conn, limits Limits) ([]byte, error) {
	if err := conn.SetReadDeadline(time.Now().Add(limits.Greeting)); err != nil {
		return nil, err
	}
	line, err := r.line()
	if err != nil {
		return nil, err
	}
	text, ok := bytes.CutPrefix(line, []byte("INFO "))
	if !ok {
		return nil, errors.New("the server does not begin with INFO")
	}
	return text, conn.SetReadDeadline(time.Time{})
}
