{{- /* Names, labels and images. Nothing random and no look-ups: the same values give the same text, so that GitOps tools see no
difference where there is none. */ -}}

{{- define "trimtab.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "trimtab.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "trimtab.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trimtab.operator" -}}
{{- printf "%s-operator" (include "trimtab.fullname" .) -}}
{{- end -}}

{{- define "trimtab.account" -}}
{{- .Values.serviceAccount.name | default (include "trimtab.operator" .) -}}
{{- end -}}

{{- define "trimtab.adminKeySecret" -}}
{{- .Values.adminKey.secretName | default (printf "%s-admin-key" (include "trimtab.fullname" .)) -}}
{{- end -}}

{{- define "trimtab.fleet" -}}
{{- .Values.fleet.configMap | default (printf "%s-fleet" (include "trimtab.fullname" .)) -}}
{{- end -}}

{{- /* Immutable: the Deployment's selector. Engines' NetworkPolicies know the operator by component and part-of. */ -}}
{{- define "trimtab.selector" -}}
app.kubernetes.io/name: {{ include "trimtab.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: trimtab
{{- end -}}

{{- define "trimtab.labels" -}}
{{ include "trimtab.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* (dict "image" .Values.images.x "root" .) → a reference; the digest wins. */ -}}
{{- define "trimtab.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- /* (dict "enabled" auto|true|false "kind" "PodMonitor" "root" .) → "true" or nothing. */ -}}
{{- define "trimtab.monitored" -}}
{{- if eq (toString .enabled) "auto" -}}
{{- if .root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind) -}}true{{- end -}}
{{- else if .enabled -}}true{{- end -}}
{{- end -}}
