package nodes

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"io"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
	"time"
)

// counting counts the reads and writes of a connection.
type counting struct {
	net.Conn
	reads, writes atomic.Int64
}

// Read implements [net.Conn].
func (c *counting) Read(p []byte) (int, error) {
	c.reads.Add(1)
	return c.Conn.Read(p)
}

// Write implements [net.Conn].
func (c *counting) Write(p []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(p)
}

// bulkPair returns both ends of a connection for large bodies.
func bulkPair(t *testing.T) (client, server *bulk, raw *counting) {
	t.Helper()
	certificate, err := newCertificate(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	dialed, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	raw = &counting{Conn: accepted}
	client = newBulk(dialed, tls.Client, &tls.Config{InsecureSkipVerify: true, DynamicRecordSizingDisabled: true}, bulkBuffer)
	server = newBulk(raw, tls.Server, &tls.Config{Certificates: []tls.Certificate{certificate}, DynamicRecordSizingDisabled: true}, firstBuffer)
	t.Cleanup(func() { _, _ = client.Close(), server.Close() })
	return client, server, raw
}

// Bytes arrive as they were written, in both directions at the same time, whatever the sizes of the
// writes, and each write is complete when it returns: nothing waits for the next one.
func TestBulkBytes(t *testing.T) {
	t.Parallel()
	client, server, _ := bulkPair(t)
	sizes := []int{1, tlsRecord - 1, tlsRecord, tlsRecord + 1, bulkBuffer, 1 << 20, 4<<20 + 7, 0, 3}
	echoed := make(chan error, 1)
	go func() {
		buf := make([]byte, 1<<20)
		for {
			n, err := server.Read(buf)
			if n > 0 {
				if _, werr := server.Write(buf[:n]); werr != nil {
					echoed <- werr
					return
				}
				server.trust() // in the midst of a body
			}
			if err != nil {
				echoed <- nil // the client has closed
				return
			}
		}
	}()
	source := rand.NewChaCha8([32]byte{1})
	for _, size := range sizes {
		sent := make([]byte, size)
		_, _ = source.Read(sent) // never fails
		written := make(chan error, 1)
		go func() {
			_, err := client.Write(sent)
			written <- err
		}()
		got := make([]byte, size)
		if _, err := io.ReadFull(client, got); err != nil {
			t.Fatal(err)
		}
		if err := <-written; err != nil || sha256.Sum256(got) != sha256.Sum256(sent) {
			t.Fatalf("%d bytes come back changed: %v", size, err)
		}
	}
	_ = client.Close()
	if err := <-echoed; err != nil {
		t.Error(err)
	}
}

// A large body takes a system call for each bulkBuffer bytes, and not for each record.
func TestBulkCollects(t *testing.T) {
	t.Parallel()
	client, server, raw := bulkPair(t)
	const size = 8 << 20
	got := make(chan int64, 1)
	go func() {
		n, _ := io.Copy(io.Discard, client) // until the server closes
		got <- n
	}()
	if err := server.Handshake(); err != nil {
		t.Fatal(err)
	}
	before := raw.writes.Load()
	if n, err := server.Write(bytes.Repeat([]byte("body"), size/4)); n != size || err != nil {
		t.Fatal(n, err)
	}
	if writes := raw.writes.Load() - before; writes > size/bulkBuffer+1 {
		t.Errorf("%d writes of %d bytes, want one for each %d", writes, size, bulkBuffer)
	}
	_ = server.Close()
	if n := <-got; n != size {
		t.Errorf("%d bytes came", n)
	}
}

// An error of a write that was held back is that of the whole write.
func TestBulkWriteFails(t *testing.T) {
	t.Parallel()
	client, server, raw := bulkPair(t)
	go func() { _ = client.Handshake() }()
	if err := server.Handshake(); err != nil {
		t.Fatal(err)
	}
	if err := raw.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := server.Write(make([]byte, tlsRecord+1)); err == nil {
		t.Error("bytes are written to a closed connection")
	}
}
