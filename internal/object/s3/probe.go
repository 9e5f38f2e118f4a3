package s3

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strings"

	minio "github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/lifecycle"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Capabilities are what [Bucket.Probe] finds that a server can do.
type Capabilities struct {
	Server            string // its own name, if it gives one
	ExclusivePut      bool   // a PUT is refused if the name exists
	ExclusiveComplete bool   // so is the completion of a multipart upload
	Checksums         bool   // bytes that differ from their CRC-32C are refused
	FullChecksum      bool   // it knows the CRC-32C of a whole object that was sent in parts
	Conditions        bool   // a read of another ETag is refused
	Consistent        bool   // a list has what was put before
	Versioned         bool   // removed objects stay as versions
	Locked            bool   // objects can be locked against removal

	Warnings []string // for the operator; each with a next step
}

// Probe tries out what the server can do, with objects below the prefix that it removes. It
// returns an error if the server cannot keep checkpoints: without exclusive commits, two
// writers of a name could both win, and a server that ignores checksums or conditions would
// store or return wrong bytes. A rule of the bucket that expires objects is an error too.
func (b *Bucket) Probe(ctx context.Context) (c Capabilities, err error) {
	p := &prober{b: b, name: "ckptstore-probe-" + strings.ToLower(rand.Text()), c: &c}
	err = p.objects(ctx)
	err = errors.Join(err, p.remove(ctx, p.name, p.name+"-parts", p.name+"-wrong"))
	if err == nil {
		err = p.configuration(ctx)
	}
	return c, err
}

// prober is one probe.
type prober struct {
	b    *Bucket
	name string
	c    *Capabilities
}

// remove removes the objects of the probe. If the bucket locks what is put there, they stay under
// no name.
func (p *prober) remove(ctx context.Context, names ...string) error {
	err := p.b.Remove(ctx, names...)
	var locked *object.LockedError
	if !errors.As(err, &locked) {
		return err
	}
	p.c.Warnings = append(p.c.Warnings, fmt.Sprintf("the bucket locks what is put there: %d bytes of this probe stay, %v, and so do checkpoints that are deleted before their lock ends", locked.Bytes, locked))
	return p.b.Hide(ctx, names...)
}

// objects tries out requests of objects.
func (p *prober) objects(ctx context.Context) error {
	if err := p.put(ctx, p.name, []byte("first")); err != nil {
		return err
	}
	err := p.put(ctx, p.name, []byte("other"))
	p.c.ExclusivePut = errors.Is(err, fs.ErrExist)
	if err != nil && !p.c.ExclusivePut {
		return err
	}
	if err := p.parts(ctx); err != nil {
		return err
	}
	if err := p.checksum(ctx); err != nil {
		return err
	}
	if err := p.condition(ctx); err != nil {
		return err
	}
	found, err := p.b.List(ctx, "")
	if err != nil {
		return err
	}
	p.c.Consistent = slices.Contains(object.Names(found), p.name)
	return p.verdict()
}

// verdict is the error of a server that lacks what is needed.
func (p *prober) verdict() error {
	var lacks []string
	for _, need := range []struct {
		has  bool
		what string
	}{
		{p.c.ExclusivePut, "exclusive PUT (If-None-Match: *)"},
		{p.c.ExclusiveComplete, "exclusive CompleteMultipartUpload (If-None-Match: *)"},
		{p.c.Checksums, "checks of x-amz-checksum-crc32c"},
		{p.c.FullChecksum, "CRC-32C of objects in parts (x-amz-checksum-type: FULL_OBJECT)"},
		{p.c.Conditions, "conditional GET (If-Match)"},
		{p.c.Consistent, "a LIST that shows what was put before"},
	} {
		if !need.has {
			lacks = append(lacks, need.what)
		}
	}
	if len(lacks) == 0 {
		return nil
	}
	name := p.c.Server
	if name == "" {
		name = "the server"
	}
	return problem.Errorf(problem.Invalid, "probe of %s: %s at %s lacks %s; use a newer version of it, or another server", p.b.at.Path(""), name, p.b.endpoint(), strings.Join(lacks, ", "))
}

// put commits a small file exclusively.
func (p *prober) put(ctx context.Context, name string, data []byte) error {
	u, err := p.b.Create(ctx, name, int64(len(data)), object.Exclusive)
	if err != nil {
		return err
	}
	defer u.Abort()
	if _, err := u.WriteAt(data, 0); err != nil {
		return err
	}
	return u.Commit(ctx)
}

// parts commits an upload of one part twice: under a new name, and under a name that is taken.
func (p *prober) parts(ctx context.Context) error {
	data := [][]byte{[]byte("a part")}
	crc := crc32c.Checksum(data[0])
	for _, name := range []string{p.name + "-parts", p.name} {
		u, parts, err := p.upload(ctx, name, data, crc)
		if err == nil {
			err = u.completeOnce(ctx, parts)
		}
		switch {
		case u == nil:
			return err
		case err != nil:
			u.abandon()
		default:
			u.stop()
		}
		taken := name == p.name
		p.c.ExclusiveComplete = taken && errors.Is(err, fs.ErrExist)
		if err != nil && !p.c.ExclusiveComplete {
			return err
		}
	}
	key := p.b.at.key(p.name + "-parts")
	return p.b.do(ctx, request{op: "look at", key: key, class: classHead}, func(ctx context.Context, c *call) error {
		_, err := c.core.StatObject(ctx, p.b.at.Bucket, key, minio.StatObjectOptions{Checksum: true})
		if err == nil {
			p.c.Server = c.answer.Get("Server")
			p.c.FullChecksum = c.answer.Get(sumHeader) == encode(crc)
		}
		return err
	})
}

// upload begins an upload of one part, which has fewer bytes than others must have, since it
// is the last.
func (p *prober) upload(ctx context.Context, name string, data [][]byte, crc uint32) (*upload, []part, error) {
	created, err := p.b.Create(ctx, name, length(data), object.Exclusive)
	if err != nil {
		return nil, nil, err
	}
	u := created.(*upload)
	_ = u.end() // it is written below its own methods
	id, err := u.begin(ctx)
	if err != nil {
		return u, nil, err
	}
	sent := part{number: 1, size: length(data), sum: crc}
	sent.etag, err = p.b.sendPart(ctx, u.key, id, 1, data, crc)
	return u, []part{sent}, err
}

// checksum sends bytes with the checksum of others.
func (p *prober) checksum(ctx context.Context) error {
	data := [][]byte{[]byte("not these")}
	key := p.b.at.key(p.name + "-wrong")
	wrong := crc32c.Checksum([]byte("but those"))
	r := request{op: "put", key: key, class: classPut, runs: data, sum: wrong, header: http.Header{sumHeader: {encode(wrong)}}}
	err := p.b.do(ctx, r, func(ctx context.Context, c *call) error {
		_, err := c.core.PutObject(ctx, p.b.at.Bucket, key, c.body, length(data), "", "", minio.PutObjectOptions{DisableContentSha256: true})
		return err
	})
	p.c.Checksums = errors.Is(err, object.ErrChanged)
	if p.c.Checksums {
		err = nil
	}
	return err
}

// condition reads a range of an object by the ETag of another.
func (p *prober) condition(ctx context.Context) error {
	key := p.b.at.key(p.name)
	return p.b.do(ctx, request{op: "read", key: key, class: classGet}, func(ctx context.Context, c *call) error {
		var options minio.GetObjectOptions
		options.Set("Range", "bytes=1-2")
		options.Set("If-Match", `"00000000000000000000000000000000"`)
		body, _, _, err := c.core.GetObject(ctx, p.b.at.Bucket, key, options)
		if err == nil {
			return body.Close()
		}
		p.c.Conditions = c.status == http.StatusPreconditionFailed
		if p.c.Conditions {
			return nil
		}
		return err
	})
}

// configuration looks at the rules of the bucket. A server that has none of a kind, or hides
// them, is a warning.
func (p *prober) configuration(ctx context.Context) error {
	var err error
	p.c.Versioned, err = p.b.versioned(ctx)
	p.answered("versioning", err)
	rule, err := p.b.locks(ctx)
	p.answered("object lock", err)
	p.c.Locked = rule.on
	if err := p.b.Uploads(ctx, "", func(string, object.Unfinished) {}); err != nil {
		p.c.Warnings = append(p.c.Warnings, fmt.Sprintf("unfinished uploads cannot be listed (%v): grant s3:ListBucketMultipartUploads, or `ckptstore gc` cannot remove what crashes leave", err))
	}
	var rules []lifecycle.Rule
	err = p.b.do(ctx, request{op: "get lifecycle rules of", class: classOther}, func(ctx context.Context, c *call) error {
		found, err := c.core.GetBucketLifecycle(ctx, p.b.at.Bucket)
		if err == nil {
			rules = found.Rules
		}
		return err
	})
	if !p.answered("lifecycle rules", err) {
		p.keepsVersions()
		return ctx.Err()
	}
	return p.rules(rules)
}

// unconfigured reports whether a failure tells that nothing is configured.
func unconfigured(err error) bool {
	var failed *Error
	return errors.As(err, &failed) && slices.Contains([]string{"NoSuchLifecycleConfiguration", "ObjectLockConfigurationNotFoundError", "NoSuchObjectLockConfiguration"}, failed.Code)
}

// answered notes the failure of a question for a part of the configuration.
func (p *prober) answered(what string, err error) bool {
	if err == nil || unconfigured(err) {
		return true
	}
	p.c.Warnings = append(p.c.Warnings, fmt.Sprintf("the bucket's %s cannot be read (%v): check that no rule expires objects, and that one removes unfinished uploads", what, err))
	return false
}

// keepsVersions warns of versions that neither this client nor a rule removes.
func (p *prober) keepsVersions() {
	if why := p.b.denial(); p.c.Versioned && why != nil {
		p.c.Warnings = append(p.c.Warnings, fmt.Sprintf("the bucket keeps versions, which cannot be removed (%v), and no rule is known that removes old ones: removed checkpoints free nothing; grant s3:ListBucketVersions and s3:DeleteObjectVersion, or add NoncurrentVersionExpiration", why))
	}
}

// rules judges the lifecycle rules that are enabled and apply to objects of the prefix.
func (p *prober) rules(rules []lifecycle.Rule) error {
	own := p.b.at.Prefix
	if own != "" {
		own += "/"
	}
	aborts, frees := false, false
	for _, rule := range rules {
		prefix := rule.Prefix + rule.RuleFilter.Prefix + rule.RuleFilter.And.Prefix // one of them is set
		tagged := !rule.RuleFilter.Tag.IsEmpty() || len(rule.RuleFilter.And.Tags) > 0
		if rule.Status != "Enabled" || tagged || !strings.HasPrefix(own, prefix) && !strings.HasPrefix(prefix, own) {
			continue
		}
		if !rule.Expiration.IsDaysNull() || !rule.Expiration.IsDateNull() || !rule.AllVersionsExpiration.IsNull() {
			return problem.Errorf(problem.Invalid, "probe of %s: lifecycle rule %q expires objects below %q: checkpoints would lose files; remove the rule, or give another prefix", p.b.at.Path(""), rule.ID, prefix)
		}
		all := strings.HasPrefix(own, prefix)
		aborts = aborts || all && !rule.AbortIncompleteMultipartUpload.IsDaysNull()
		frees = frees || all && !rule.NoncurrentVersionExpiration.IsDaysNull()
	}
	if !aborts {
		p.c.Warnings = append(p.c.Warnings, "no lifecycle rule removes unfinished uploads: add one with AbortIncompleteMultipartUpload of 7 days, or pay for what crashes leave")
	}
	if !frees {
		p.keepsVersions()
	}
	return nil
}
