package faultproxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/object/sigv4"
)

// flipped returns data with the lowest bit of one byte flipped.
func flipped(data []byte, at int) []byte {
	data = bytes.Clone(data)
	data[at] ^= 1
	return data
}

func TestAlteredAnswers(t *testing.T) {
	p, _ := begin(t, sigv4.Key{})
	data := noise(600_000)
	put(t, p, "/b/k", data)
	last := len(data) - 1
	for name, test := range map[string]struct {
		do    Action
		want  []byte
		sized bool // needs a body whose length is declared
	}{
		"flip the first":     {FlipReceived(0), flipped(data, 0), false},
		"flip":               {FlipReceived(300_000), flipped(data, 300_000), false},
		"flip the last":      {FlipReceived(-1), flipped(data, last), true},
		"flip past the end":  {FlipReceived(1 << 40), flipped(data, last), true},
		"flip before all":    {FlipReceived(-1 << 40), flipped(data, 0), false},
		"add in the middle":  {AddByte(1000), slices.Concat(data[:1000], []byte{0}, data[1000:]), false},
		"add at the end":     {AddByte(1 << 40), append(bytes.Clone(data), 0), false},
		"shorten by one":     {Shorten(1), data[:last], true},
		"shorten to nothing": {Shorten(1 << 40), nil, false},
	} {
		for _, query := range []string{"", "?chunked"} {
			if test.sized && query != "" {
				continue
			}
			i := p.Inject(Fault{Match: Of(Get), Do: test.do})
			got := get(t, p, "/b/k"+query)
			i.Remove()
			if got.err != nil || !bytes.Equal(got.body, test.want) {
				t.Errorf("%s%s: %d bytes, %v; want %d", name, query, len(got.body), got.err, len(test.want))
			}
		}
	}
	if got := get(t, p, "/b/k"); !bytes.Equal(got.body, data) {
		t.Error("the faults are removed, and the answer is not right")
	}
}

func TestAlteredHeads(t *testing.T) {
	p, _ := begin(t, sigv4.Key{})
	data := noise(100)
	put(t, p, "/b/k", data)
	p.Inject(Fault{Do: WrongETag()})
	p.Inject(Fault{Do: WrongRange(2)})
	got := do(t.Context(), t, nil, "GET", p.URL()+"/b/k", nil, http.Header{"Range": {"bytes=4-7"}})
	if got.header.Get("ETag") == `"right"` || got.header.Get("Content-Range") != "bytes 4-7/100" || !bytes.Equal(got.body, data[6:10]) {
		t.Errorf("%v, %v, %v", got.header, got.body, got.err)
	}
	if got := get(t, p, "/b/k"); !bytes.Equal(got.body, data) {
		t.Errorf("without a range: %d bytes, %v", len(got.body), got.err)
	}
}

func TestMoveRange(t *testing.T) {
	for _, c := range []struct {
		text, unit string
		shift      int64
		want       string
	}{
		{"bytes=4-7", "bytes=", 3, "bytes=7-10"},
		{"bytes=4-", "bytes=", -6, "bytes=0-"},
		{"bytes 4-7/*", "bytes ", -1, "bytes 3-6/*"},
		{"bytes=-4", "bytes=", 3, ""},
		{"bytes=4-7", "bytes=", 0, ""},
		{"bytes=4-7,9-10", "bytes=", 1, ""},
		{"", "bytes=", 1, ""},
	} {
		if got := moveRange(c.text, c.unit, c.shift); got != c.want {
			t.Errorf("%q moved by %d: %q, want %q", c.text, c.shift, got, c.want)
		}
	}
}

func TestBrokenAnswers(t *testing.T) {
	p, k := begin(t, sigv4.Key{})
	data := noise(600_000)
	put(t, p, "/b/k", data)
	for name, test := range map[string]struct {
		do   Action
		want int  // bytes received
		acts bool // the server
		ends bool // otherwise the client gives up
	}{
		"cut at once":       {CutReceived(0), 0, true, true},
		"cut":               {CutReceived(1000), 1000, true, true},
		"cut the last byte": {CutReceived(1 << 40), 599_999, true, true},
		"stall":             {StallReceived(1000), 1000, true, false},
		"kill":              {Kill(), 0, false, true},
		"drop":              {DropAnswer(), 0, true, true},
		"hang":              {Hang(), 0, true, false},
		"delay":             {Delay(patience), 0, true, false},
	} {
		before, _ := k.seen()
		i := p.Inject(Fault{Do: test.do})
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		if !test.ends {
			cancel()
			ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
		}
		got := do(ctx, t, nil, "GET", p.URL()+"/b/k", nil, nil)
		cancel()
		i.Remove()
		if len(got.body) != test.want || !bytes.HasPrefix(data, got.body) || got.err == nil || timedOut(got.err) == test.ends {
			t.Errorf("%s: %d bytes, %v", name, len(got.body), got.err)
		}
		if after, _ := k.seen(); (after > before) != test.acts {
			t.Errorf("%s: the server received %d requests", name, after-before)
		}
		if i.Hits() != 1 {
			t.Errorf("%s: %d hits", name, i.Hits())
		}
	}
	i := p.Inject(Fault{Do: CutReceived(1 << 40)})
	if got := get(t, p, "/b/k?chunked"); len(got.body) != len(data) || !errors.Is(got.err, io.ErrUnexpectedEOF) {
		t.Errorf("a body of unknown length, cut at its end: %d bytes, %v", len(got.body), got.err)
	}
	i.Remove()
	if got := get(t, p, "/b/k"); got.err != nil || len(got.body) != len(data) {
		t.Errorf("later: %d bytes, %v", len(got.body), got.err)
	}
}

func TestBrokenRequests(t *testing.T) {
	p, k := begin(t, sigv4.Key{})
	data := noise(600_000)
	for name, test := range map[string]struct {
		do   Action
		want []byte
		cut  bool
	}{
		"flip":     {FlipSent(70_000), flipped(data, 70_000), false},
		"flip two": {func(p *plan) { FlipSent(-1)(p); FlipSent(0)(p) }, flipped(flipped(data, 0), len(data)-1), false},
		"cut":      {CutSent(70_000), data[:70_000], true},
		"drop":     {DropAnswer(), data, true},
	} {
		path := "/b/" + strings.ReplaceAll(name, " ", "-")
		i := p.Inject(Fault{Do: test.do})
		got := do(t.Context(), t, nil, "PUT", p.URL()+path, data, nil)
		i.Remove()
		if (got.err != nil) != test.cut {
			t.Errorf("%s: status %d, %v", name, got.status, got.err)
		}
		until(t, name+": the server has received it", func() bool { body, _ := k.body(path); return body != nil })
		if body, _ := k.body(path); !bytes.Equal(body, test.want) {
			t.Errorf("%s: the server received %d other bytes", name, len(body))
		}
	}
	p.Inject(Fault{Do: FlipSent(0)})
	if got := do(t.Context(), t, nil, "PUT", p.URL()+"/b/empty", nil, nil); got.err != nil {
		t.Errorf("an empty body has no bit to flip: %v", got.err)
	}
}

func TestRefuse(t *testing.T) {
	p, k := begin(t, sigv4.Key{})
	c := client(t)
	i := p.Inject(Fault{Match: Of(Put), Skip: 1, Times: 2, Do: SlowDown()})
	var codes []int
	for range 5 {
		got := do(t.Context(), t, c, "PUT", p.URL()+"/b/k", noise(2<<20), nil)
		codes = append(codes, got.status)
		if got.status != http.StatusOK && !bytes.Contains(got.body, []byte("<Code>SlowDown</Code>")) {
			t.Errorf("%q, %v", got.body, got.err)
		}
	}
	if !slices.Equal(codes, []int{200, 503, 503, 200, 200}) || i.Hits() != 2 {
		t.Errorf("%v, %d hits", codes, i.Hits())
	}
	if n, _ := k.seen(); n != 3 {
		t.Errorf("the server received %d requests", n)
	}
	if n := p.Counts(); n.Connections != 1 || n.Of(Put).Sent != 5*2<<20 {
		t.Errorf("counts: %v", n)
	}
	p.Inject(Fault{Match: Of(Head, Complete), Do: Refuse(200, "InternalError")})
	if got := do(t.Context(), t, c, "HEAD", p.URL()+"/b/k", nil, nil); got.err != nil || got.status != 200 {
		t.Errorf("head: %d, %v", got.status, got.err)
	}
	if got := do(t.Context(), t, c, "POST", p.URL()+"/b/k?uploadId=u", nil, nil); got.status != 200 || !bytes.Contains(got.body, []byte("<Error><Code>InternalError<")) {
		t.Errorf("complete: %d, %q, %v", got.status, got.body, got.err)
	}
}

// Equal seeds hit the same requests, and about as many as they should.
func TestShare(t *testing.T) {
	hits := func(seed uint64) (list []int) {
		i := new(Proxy).Inject(Fault{Share: 0.3, Seed: seed})
		for n := range 1000 {
			if i.hit(Request{}) {
				list = append(list, n)
			}
		}
		return list
	}
	one, again, other := hits(1), hits(1), hits(2)
	if !slices.Equal(one, again) || slices.Equal(one, other) || len(one) < 250 || len(one) > 350 {
		t.Errorf("%d, %d and %d hits of 1000", len(one), len(again), len(other))
	}
}

func TestStop(t *testing.T) {
	for _, when := range []When{Before, After} {
		p, k := begin(t, sigv4.Key{})
		called := make(chan struct{}, 6)
		p.Inject(Fault{Match: Of(Part), Skip: 2, Times: 1, Do: Stop(when, func(r Request) {
			if r.Number != 4 || r.Key != "k" || r.Query.Get("partNumber") != "3" || !p.Stopped() {
				t.Errorf("stopped at %+v", r)
			}
			called <- struct{}{}
		})})
		var failed []int
		for n := range 6 {
			target := fmt.Sprintf("/b/k?uploadId=u&partNumber=%d", n)
			if n == 0 {
				target = "/b/other"
			}
			if got := do(t.Context(), t, nil, "PUT", p.URL()+target, noise(1000), nil); got.err != nil {
				failed = append(failed, n)
			}
		}
		select { // it is called after the connections are closed
		case <-called:
		case <-time.After(time.Minute):
			t.Errorf("%v: the function was not called", when)
		}
		if !slices.Equal(failed, []int{3, 4, 5}) || len(called) > 0 || !p.Stopped() {
			t.Errorf("%v: requests %v failed, the function was called %d more times", when, failed, len(called))
		}
		if n, _ := k.seen(); n != 3+int(when) {
			t.Errorf("%v: the server received %d requests", when, n)
		}
		p.Resume()
		put(t, p, "/b/k", noise(1000))
	}
}

// Stop also ends requests that began before it.
func TestStopClosesConnections(t *testing.T) {
	p, k := begin(t, sigv4.Key{})
	p.Inject(Fault{Match: Of(Get), Do: Hang()})
	p.Inject(Fault{Match: Of(Put), Do: Stop(Before, nil)})
	failed := make(chan error, 1)
	go func() { failed <- do(context.Background(), t, client(t), "GET", p.URL()+"/b/k", nil, nil).err }()
	until(t, "the first request arrives", func() bool { n, _ := k.seen(); return n == 1 })
	do(t.Context(), t, nil, "PUT", p.URL()+"/b/k", nil, nil)
	select {
	case err := <-failed:
		if err == nil {
			t.Error("the request that hung was answered")
		}
	case <-time.After(patience):
		t.Error("the request still hangs")
	}
}

// A server without support for conditions does not see them, and the signature is right.
func TestDropHeaders(t *testing.T) {
	key := sigv4.Key{Access: "access", Secret: "secret"}
	header := func(r *http.Request) { // of a client
		r.Header.Set("If-None-Match", "*")
		r.Header.Set("X-Amz-Checksum-Crc32c", "AAAAAA==")
		r.Header.Set("X-Amz-Checksum-Type", "FULL_OBJECT")
		r.Header.Set("X-Amz-Meta-Token", "t")
		sigv4.Sign(r, key, "us-east-1", sigv4.Unsigned, time.Now())
	}
	for name, of := range map[string]sigv4.Key{"key": key, "no key": {}} {
		p, k := begin(t, of)
		p.Inject(Fault{Do: DropHeaders("If-None-Match", "x-amz-checksum-*")})
		r, err := http.NewRequestWithContext(t.Context(), "PUT", p.URL()+"/b/k", strings.NewReader("data"))
		if err != nil {
			t.Fatal(err)
		}
		header(r)
		answer, err := client(t).Do(r)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		n, last := k.seen()
		if name == "no key" {
			if n != 0 || answer.StatusCode != http.StatusBadRequest || !strings.Contains(string(text), "Options.Key") {
				t.Errorf("%s: status %d, %s", name, answer.StatusCode, text)
			}
			continue
		}
		if answer.StatusCode != http.StatusOK || n != 1 {
			t.Fatalf("%s: status %d, %s", name, answer.StatusCode, text)
		}
		if h := last.Header; h.Get("If-None-Match")+h.Get("X-Amz-Checksum-Crc32c")+h.Get("X-Amz-Checksum-Type") != "" || h.Get("X-Amz-Meta-Token") != "t" {
			t.Errorf("the server received %v", h)
		}
		signed := last.Header.Get("Authorization")
		if err := sigv4.Resign(last, key); err != nil || last.Header.Get("Authorization") != signed || strings.Contains(signed, "if-none-match") {
			t.Errorf("the server received the signature %s, and computes %s, %v", signed, last.Header.Get("Authorization"), err)
		}
	}
}

// Elements of a document disappear, and its signature and its hash are right.
func TestDropElements(t *testing.T) {
	key := sigv4.Key{Access: "access", Secret: "secret"}
	p, k := begin(t, key)
	p.Inject(Fault{Match: Of(Complete), Do: DropElements("ChecksumCRC32C", "a.b")})
	const text, want = "<X><Part><ETag>e</ETag><ChecksumCRC32C>AAAAAA==</ChecksumCRC32C></Part><axb>1</axb></X>", "<X><Part><ETag>e</ETag></Part><axb>1</axb></X>"
	r, err := http.NewRequestWithContext(t.Context(), "POST", p.URL()+"/b/k?uploadId=u", strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	sigv4.Sign(r, key, "us-east-1", sigv4.Hash([]byte(text)), time.Now())
	answer, err := client(t).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	_ = answer.Body.Close()
	body, err := k.body("/b/k")
	_, last := k.seen()
	if string(body) != want || err != nil || last.ContentLength != int64(len(want)) || last.Header.Get("X-Amz-Content-Sha256") != sigv4.Hash([]byte(want)) {
		t.Errorf("the server received %q, %v, %v", body, err, last.Header)
	}
	signed := last.Header.Get("Authorization")
	if err := sigv4.Resign(last, key); err != nil || last.Header.Get("Authorization") != signed {
		t.Errorf("the server received the signature %s, and computes %s, %v", signed, last.Header.Get("Authorization"), err)
	}
	p.Inject(Fault{Match: Of(Put), Do: DropElements("X")})
	if got := do(t.Context(), t, nil, "PUT", p.URL()+"/b/large", noise(documentLimit+1), nil); got.status != http.StatusBadRequest {
		t.Errorf("a large body: status %d, %v", got.status, got.err)
	}
}
