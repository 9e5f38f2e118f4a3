package jetlog

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"sync/atomic"
	"time"
)

// servers are the servers of a URL, for connections that speak the protocol themselves.
type servers struct {
	all  []*url.URL
	o    Options
	next atomic.Uint64 // the server that is tried first
}

const defaultPort = "4222"

// newServers parses the URL of o.
func newServers(o Options) (*servers, error) {
	s := &servers{o: o}
	for text := range strings.SplitSeq(o.URL, ",") {
		if text = strings.TrimSpace(text); !strings.Contains(text, "://") {
			text = "nats://" + text
		}
		u, err := url.Parse(text)
		if err != nil {
			return nil, errors.New("the URL is invalid: " + Redacted(o.URL))
		}
		if u.Scheme != "nats" && u.Scheme != "tls" {
			return nil, fmt.Errorf("%s://: only nats:// and tls:// are supported for clients", u.Scheme)
		}
		s.all = append(s.all, u)
	}
	return s, nil
}

// dial connects to the first server that answers. It stops before the INFO line, which
// the caller reads first. It takes at most the timeout of one attempt for each server.
func (s *servers) dial() (net.Conn, error) {
	var errs []error
	begin := s.next.Add(1)
	for i := range s.all {
		u := s.all[(begin+uint64(i))%uint64(len(s.all))] //nolint:gosec // small
		conn, err := s.greeted(u)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", u.Host, err))
	}
	return nil, errors.Join(errs...)
}

func (s *servers) greeted(u *url.URL) (_ net.Conn, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.o.Timeout)
	defer cancel()
	var d net.Dialer
	host := u.Hostname()
	conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, cmp.Or(u.Port(), defaultPort)))
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, conn.Close())
		}
	}()
	if err := conn.SetDeadline(time.Now().Add(s.o.Timeout)); err != nil {
		return nil, err
	}
	line, err := infoLine(conn)
	if err != nil {
		return nil, err
	}
	var info struct {
		TLS bool `json:"tls_required"`
	}
	if err := json.Unmarshal(bytes.TrimPrefix(line, []byte("INFO ")), &info); err != nil {
		return nil, fmt.Errorf("decode the server's INFO: %w", err)
	}
	if info.TLS || s.o.TLS != nil || u.Scheme == "tls" {
		c := &tls.Config{MinVersion: tls.VersionTLS12}
		if s.o.TLS != nil {
			c = s.o.TLS.Clone()
		}
		c.ServerName = cmp.Or(c.ServerName, host)
		secure := tls.Client(conn, c)
		if err := secure.HandshakeContext(ctx); err != nil {
			return nil, err
		}
		conn = secure
	}
	return &greetedConn{Conn: conn, first: line}, conn.SetDeadline(time.Time{})
}

// infoLine reads the first line of a server and nothing after it, which may be TLS.
func infoLine(conn net.Conn) ([]byte, error) {
	const most = 64 << 10
	var line []byte
	for one := make([]byte, 1); len(line) < most; {
		if _, err := conn.Read(one); err != nil {
			return nil, err
		}
		line = append(line, one[0])
		if one[0] == '\n' {
			if !bytes.HasPrefix(line, []byte("INFO ")) {
				break
			}
			return line, nil
		}
	}
	return nil, errors.New("the peer is not a NATS server")
}

// greetedConn is a connection whose first line was read already.
type greetedConn struct {
	net.Conn
	first []byte
}

// Read implements [net.Conn].
func (c *greetedConn) Read(p []byte) (int, error) {
	if len(c.first) > 0 {
		n := copy(p, c.first)
		c.first = c.first[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

// credentials returns the members of CONNECT that identify this process to the server,
// as the client library sends them.
func (s *servers) credentials() map[string]string {
	for _, u := range s.all {
		if u.User == nil {
			continue
		}
		if password, named := u.User.Password(); named {
			return map[string]string{"user": u.User.Username(), "pass": password}
		}
		return map[string]string{"auth_token": u.User.Username()}
	}
	token := s.o.Token
	if s.o.FindToken != nil {
		token = s.o.FindToken()
	}
	if token == "" {
		return nil
	}
	return map[string]string{"auth_token": token}
}
