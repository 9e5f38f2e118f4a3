// Package sigv4 signs requests to S3 servers, for tests: with Signature Version 4, in the
// Authorization header. The data path has a client of its own.
//
//	Sign    a request that is not signed yet
//	Resign  a signed request again, after its headers or its payload hash were altered
package sigv4

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	algorithm  = "AWS4-HMAC-SHA256"
	dateHeader = "X-Amz-Date"
	hashHeader = "X-Amz-Content-Sha256"
	stamp      = "20060102T150405Z"
)

// Unsigned is the payload hash of a request whose body is not signed.
const Unsigned = "UNSIGNED-PAYLOAD"

// Hash returns the payload hash of a body.
func Hash(body []byte) string {
	sum := sha256.Sum256(body)
	return hex.EncodeToString(sum[:])
}

// Key is a pair of access key and secret key.
type Key struct{ Access, Secret string }

// Sign signs a request for a region at a time, with its host and all of its headers.
// payload is [Unsigned], or the [Hash] of the body.
func Sign(r *http.Request, key Key, region, payload string, now time.Time) {
	now = now.UTC()
	r.Header.Set(dateHeader, now.Format(stamp))
	r.Header.Set(hashHeader, payload)
	names := []string{"host"}
	for name := range r.Header {
		if name = strings.ToLower(name); name != "authorization" && name != "user-agent" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	s := signature{key: key, scope: now.Format("20060102") + "/" + region + "/s3/aws4_request", names: names}
	s.put(r)
}

// Resign signs a signed request again: with the scope, the time and the signed headers it
// has, except headers that were removed. It returns an error for a request whose signature
// is not in its Authorization header, or is that of another access key.
func Resign(r *http.Request, key Key) error {
	fields, ok := strings.CutPrefix(r.Header.Get("Authorization"), algorithm+" ")
	if !ok {
		return errors.New("sign again: the request has no Authorization header of " + algorithm)
	}
	s := signature{key: key}
	for field := range strings.SplitSeq(fields, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(field), "=")
		switch name {
		case "Credential":
			access, scope, _ := strings.Cut(value, "/")
			if access != key.Access {
				return fmt.Errorf("sign again: the request was signed with access key %.40q, not with %.40q", access, key.Access)
			}
			s.scope = scope
		case "SignedHeaders":
			s.names = strings.Split(value, ";")
		}
	}
	if strings.Count(s.scope, "/") != 3 || len(s.names) == 0 {
		return errors.New("sign again: the Authorization header has no scope or no signed headers")
	}
	s.names = slices.DeleteFunc(s.names, func(name string) bool {
		return name != "host" && name != "content-length" && len(r.Header.Values(name)) == 0
	})
	s.put(r)
	return nil
}

// signature is what an Authorization header is made of, besides the request.
type signature struct {
	key   Key
	scope string   // date/region/service/aws4_request
	names []string // of the signed headers, sorted, in lower case
}

// put computes the signature and sets the request's Authorization header.
func (s signature) put(r *http.Request) {
	request := sha256.Sum256([]byte(s.canonical(r)))
	text := strings.Join([]string{algorithm, r.Header.Get(dateHeader), s.scope, hex.EncodeToString(request[:])}, "\n")
	key := []byte("AWS4" + s.key.Secret)
	for part := range strings.SplitSeq(s.scope, "/") {
		key = mac(key, part)
	}
	r.Header.Set("Authorization", fmt.Sprintf("%s Credential=%s/%s,SignedHeaders=%s,Signature=%x",
		algorithm, s.key.Access, s.scope, strings.Join(s.names, ";"), mac(key, text)))
}

// canonical returns the canonical form of a request, which both ends hash.
func (s signature) canonical(r *http.Request) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n%s\n%s\n", r.Method, escape(cmp.Or(r.URL.Path, "/"), true), query(r.URL.RawQuery))
	for _, name := range s.names {
		var values []string
		switch {
		case name == "host":
			values = []string{cmp.Or(r.Host, r.URL.Host)}
		case name == "content-length" && r.Header.Get(name) == "":
			values = []string{strconv.FormatInt(r.ContentLength, 10)}
		default:
			values = slices.Clone(r.Header.Values(name))
		}
		for i, v := range values {
			values[i] = strings.Join(strings.Fields(v), " ")
		}
		fmt.Fprintf(&b, "%s:%s\n", name, strings.Join(values, ","))
	}
	fmt.Fprintf(&b, "\n%s\n%s", strings.Join(s.names, ";"), r.Header.Get(hashHeader))
	return b.String()
}

// query returns a query in canonical form: sorted, and escaped in one way.
func query(raw string) string {
	values, _ := url.ParseQuery(raw) // of a malformed one, the rest
	var pairs []string
	for name, list := range values {
		for _, v := range list {
			pairs = append(pairs, escape(name, false)+"="+escape(v, false))
		}
	}
	slices.Sort(pairs)
	return strings.Join(pairs, "&")
}

// escape escapes everything but unreserved characters, and slashes if they are kept.
func escape(text string, slashes bool) string {
	var b strings.Builder
	for i := range len(text) {
		c := text[i]
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', strings.IndexByte("-._~", c) >= 0, slashes && c == '/':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

func mac(key []byte, text string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(text))
	return h.Sum(nil)
}
