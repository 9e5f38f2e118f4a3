package s3

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/internal/crc32c"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a server in memory, without connections: it works under a fake clock, and does what
// a test tells it to.
type fake struct {
	mu      sync.Mutex
	objects map[string]stored
	uploads map[string]map[int]stored
	tokens  map[string]http.Header // headers of uploads
	log     []string               // requests, as "PUT", "POST uploads"
	fault   func(kind string, n int, r *http.Request) *fault
	seen    map[string]int
}

type stored struct {
	data   []byte
	header http.Header
}

// fault is what happens to a request.
type fault struct {
	status int // answered without acting, with code
	code   string
	body   string // in place of an error document
	header http.Header
	before error // the connection fails, and the server has not acted
	after  error // it has
	then   func(*http.Response)
}

var errReset = errors.New("connection reset by peer")

func newFake() *fake {
	return &fake{objects: map[string]stored{}, uploads: map[string]map[int]stored{}, tokens: map[string]http.Header{}, seen: map[string]int{}}
}

// bucket returns a bucket on the server.
func (f *fake) bucket(t *testing.T, options Options) *Bucket {
	t.Helper()
	options.Transport = f
	if options.Keys == nil {
		options.Keys = Static("access", "secret")
	}
	b, err := New(Location{Bucket: "bucket", Prefix: "p", Endpoint: "http://server.test:9000"}, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// requests returns the log, and forgets it.
func (f *fake) requests() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	log := f.log
	f.log = nil
	return log
}

func (f *fake) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	var body []byte
	if r.Body != nil {
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
		_ = r.Body.Close()
	}
	query := r.URL.Query()
	kind := r.Method
	for _, name := range []string{"uploads", "uploadId", "list-type", "delete", "versioning", "versions", "versionId", "lifecycle", "object-lock"} {
		if query.Has(name) {
			kind += " " + name
		}
	}
	f.mu.Lock()
	f.log = append(f.log, kind)
	f.seen[kind]++
	n := f.seen[kind]
	f.mu.Unlock()
	var do *fault
	if f.fault != nil {
		do = f.fault(kind, n, r)
	}
	if do == nil {
		do = &fault{}
	}
	switch {
	case do.before != nil:
		return nil, do.before
	case do.status != 0 && do.body != "":
		return answer(r, do.status, do.header, []byte(do.body)), nil
	case do.status != 0:
		return refuse(r, do.status, do.code, do.header), nil
	}
	res := f.act(r, kind, body)
	if do.after != nil {
		return nil, do.after
	}
	if do.then != nil {
		do.then(res)
	}
	return res, nil
}

func answer(r *http.Request, status int, header http.Header, body []byte) *http.Response {
	h := http.Header{"X-Amz-Request-Id": {"REQ1"}, "Last-Modified": {"Wed, 21 Oct 2015 07:28:00 GMT"}, "Content-Length": {strconv.Itoa(len(body))}}
	maps.Copy(h, header)
	res := &http.Response{StatusCode: status, Status: fmt.Sprintf("%d %s", status, http.StatusText(status)), Header: h, Request: r, ProtoMajor: 1, ProtoMinor: 1, ContentLength: int64(len(body)), Body: http.NoBody}
	if r.Method != http.MethodHead {
		res.Body = io.NopCloser(bytes.NewReader(body))
	}
	return res
}

func refuse(r *http.Request, status int, code string, header http.Header) *http.Response {
	return answer(r, status, header, fmt.Appendf(nil, "<?xml version=\"1.0\"?>\n<Error><Code>%s</Code><Message>the server refuses</Message><RequestId>REQ1</RequestId></Error>", code))
}

func (f *fake) act(r *http.Request, kind string, body []byte) *http.Response {
	f.mu.Lock()
	defer f.mu.Unlock()
	key := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/bucket"), "/")
	query := r.URL.Query()
	if want := r.Header.Get(sumHeader); want != "" && !strings.HasPrefix(kind, "POST") {
		if got := base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, crc32c.Checksum(body))); got != want {
			return refuse(r, http.StatusBadRequest, "BadDigest", nil)
		}
	}
	_, taken := f.objects[key]
	if r.Header.Get("If-None-Match") == "*" && taken {
		return refuse(r, http.StatusPreconditionFailed, "PreconditionFailed", nil)
	}
	switch kind {
	case "PUT":
		f.objects[key] = stored{body, r.Header}
		return answer(r, 200, http.Header{"Etag": {etag(body)}}, nil)
	case "POST uploads":
		id := fmt.Sprint("upload-", len(f.tokens))
		f.uploads[id], f.tokens[id] = map[int]stored{}, r.Header
		return answer(r, 200, nil, fmt.Appendf(nil, "<InitiateMultipartUploadResult><UploadId>%s</UploadId></InitiateMultipartUploadResult>", id))
	case "PUT uploadId":
		number, _ := strconv.Atoi(query.Get("partNumber"))
		if f.uploads[query.Get("uploadId")] == nil {
			return refuse(r, 404, "NoSuchUpload", nil)
		}
		f.uploads[query.Get("uploadId")][number] = stored{body, r.Header}
		return answer(r, 200, http.Header{"Etag": {etag(body)}}, nil)
	case "POST uploadId":
		return f.complete(r, key, query.Get("uploadId"), body)
	case "DELETE uploadId":
		delete(f.uploads, query.Get("uploadId"))
		return answer(r, 204, nil, nil)
	case "DELETE":
		delete(f.objects, key)
		return answer(r, 204, nil, nil)
	case "POST delete":
		return f.remove(r, body)
	case "GET list-type":
		return f.list(r)
	case "GET", "HEAD":
		return f.get(r, key)
	}
	return refuse(r, http.StatusNotImplemented, "NotImplemented", nil)
}

func etag(data []byte) string { return fmt.Sprintf("\"%08x-%d\"", crc32c.Checksum(data), len(data)) }

func (f *fake) complete(r *http.Request, key, id string, body []byte) *http.Response {
	parts := f.uploads[id]
	if parts == nil {
		return refuse(r, 404, "NoSuchUpload", nil)
	}
	var list struct {
		Part []struct{ PartNumber int }
	}
	if err := xml.Unmarshal(body, &list); err != nil {
		return refuse(r, 400, "MalformedXML", nil)
	}
	var data []byte
	for _, p := range list.Part {
		data = append(data, parts[p.PartNumber].data...)
	}
	header := f.tokens[id].Clone()
	if want := r.Header.Get(sumHeader); want != "" {
		if want != encode(crc32c.Checksum(data)) {
			return refuse(r, 400, "BadDigest", nil)
		}
		header.Set(sumHeader, want)
	}
	f.objects[key] = stored{data, header}
	delete(f.uploads, id)
	return answer(r, 200, nil, fmt.Appendf(nil, "<CompleteMultipartUploadResult><Bucket>bucket</Bucket><Key>%s</Key><ETag>x</ETag></CompleteMultipartUploadResult>", key))
}

func (f *fake) remove(r *http.Request, body []byte) *http.Response {
	var list struct {
		Object []struct{ Key string }
	}
	if err := xml.Unmarshal(body, &list); err != nil {
		return refuse(r, 400, "MalformedXML", nil)
	}
	var b bytes.Buffer
	b.WriteString("<DeleteResult>")
	for _, o := range list.Object {
		if strings.HasSuffix(o.Key, "locked") {
			fmt.Fprintf(&b, "<Error><Key>%s</Key><Code>AccessDenied</Code><Message>locked</Message></Error>", o.Key)
			continue
		}
		delete(f.objects, o.Key)
		fmt.Fprintf(&b, "<Deleted><Key>%s</Key></Deleted>", o.Key)
	}
	b.WriteString("</DeleteResult>")
	return answer(r, 200, nil, b.Bytes())
}

func (f *fake) list(r *http.Request) *http.Response {
	query := r.URL.Query()
	prefix, after := query.Get("prefix"), max(query.Get("start-after"), query.Get("continuation-token"))
	most, _ := strconv.Atoi(query.Get("max-keys"))
	var b bytes.Buffer
	seen, n, last := map[string]bool{}, 0, ""
	b.WriteString("<ListBucketResult>")
	for _, key := range slices.Sorted(maps.Keys(f.objects)) {
		rest, below := strings.CutPrefix(key, prefix)
		if !below || key <= after {
			continue
		}
		dir := ""
		if name, _, ok := strings.Cut(rest, "/"); ok && query.Get("delimiter") == "/" {
			dir = prefix + name + "/"
		}
		if seen[dir] || dir != "" && strings.HasPrefix(after, dir) {
			last = key
			continue
		}
		if n == most {
			fmt.Fprintf(&b, "<IsTruncated>true</IsTruncated><NextContinuationToken>%s</NextContinuationToken>", last)
			break
		}
		n, last = n+1, key
		if dir != "" {
			seen[dir] = true
			fmt.Fprintf(&b, "<CommonPrefixes><Prefix>%s</Prefix></CommonPrefixes>", dir)
			continue
		}
		fmt.Fprintf(&b, "<Contents><Key>%s</Key><Size>%d</Size><LastModified>2015-10-21T07:28:00.000Z</LastModified><ETag>x</ETag></Contents>", key, len(f.objects[key].data))
	}
	b.WriteString("</ListBucketResult>")
	return answer(r, 200, nil, b.Bytes())
}

func (f *fake) get(r *http.Request, key string) *http.Response {
	o, there := f.objects[key]
	if !there {
		return refuse(r, 404, "NoSuchKey", nil)
	}
	header := http.Header{"Etag": {etag(o.data)}}
	if sum := o.header.Get(sumHeader); sum != "" {
		header.Set(sumHeader, sum)
	}
	if token := o.header.Get(tokenHeader); token != "" {
		header.Set(tokenHeader, token)
	}
	if match := r.Header.Get("If-Match"); match != "" && match != etag(o.data) {
		return refuse(r, 412, "PreconditionFailed", nil)
	}
	data, status := o.data, 200
	if text := r.Header.Get("Range"); text != "" {
		var first, last int
		_, _ = fmt.Sscanf(text, "bytes=%d-%d", &first, &last)
		if first >= len(data) {
			return refuse(r, 416, "InvalidRange", nil)
		}
		last = min(last, len(data)-1)
		header.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(data)))
		data, status = data[first:last+1], 206
	}
	return answer(r, status, header, data)
}
